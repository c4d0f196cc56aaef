import datetime

import botocore.auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials, ReadOnlyCredentials
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier_s3.signing import EMPTY, UNSIGNED, Signer

WORDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=30)
PATHS = st.sampled_from(["/", "/kv", "/kv/a/b.kv", "/kv/a%20b/%C3%BC%2B%25.kv", "/a//b/../c"])
QUERIES = st.sampled_from(["", "list-type=2&max-keys=1&prefix=a%2Fb%20c"])
HEADERS = st.dictionaries(
    st.sampled_from(["if-none-match", "x-amz-server-side-encryption", "x-amz-acl", "range"]), WORDS
)


def theirs(method, path, query, headers, hashed, credentials, now_s) -> str:
    url = f"http://h:9000{path}" + (f"?{query}" if query else "")
    request = AWSRequest(method, url, headers={**headers, "x-amz-content-sha256": hashed})
    signer = botocore.auth.S3SigV4Auth(Credentials(*credentials), "s3", "eu-west-1")
    signer.payload = lambda request: hashed
    # Truncate first, because fromtimestamp rounds to a microsecond and can reach the next second.
    moment = datetime.datetime.fromtimestamp(int(now_s), datetime.UTC)
    request.context["timestamp"] = moment.strftime("%Y%m%dT%H%M%SZ")
    request.headers["X-Amz-Date"] = request.context["timestamp"]
    if credentials.token:
        request.headers["X-Amz-Security-Token"] = credentials.token
    canonical = signer.canonical_request(request)
    signature = signer.signature(signer.string_to_sign(request, canonical), request)
    listed = signer.signed_headers(signer.headers_to_sign(request))
    return (
        f"AWS4-HMAC-SHA256 Credential={signer.scope(request)}, SignedHeaders={listed}, "
        f"Signature={signature}"
    )


@given(
    st.sampled_from(["GET", "PUT", "HEAD"]),
    PATHS,
    QUERIES,
    HEADERS,
    st.sampled_from([EMPTY, UNSIGNED]),
    st.builds(ReadOnlyCredentials, WORDS, WORDS, st.none() | WORDS),
    st.floats(0, 4e9),
)
@example("GET", "/", "", {}, EMPTY, ReadOnlyCredentials("0", "0", None), 1.9999995231628418)
def test_our_signatures_are_botocores(method, path, query, headers, hashed, credentials, now_s):
    signer = Signer("h:9000", "eu-west-1")
    expected = theirs(method, path, query, headers, hashed, credentials, now_s)
    for _ in range(2):  # the second signature uses the cached key
        signed = signer.headers(method, path, query, headers, hashed, credentials, now_s)
        assert signed["authorization"] == expected
    assert headers.items() <= signed.items()


def test_a_key_is_remembered_for_its_day_and_secret_only():
    ours = ReadOnlyCredentials("id", "one", None)
    signer = Signer("h:9000", "eu-west-1")
    for credentials in (ours, ReadOnlyCredentials("id", "two", None), ours):
        for now_s in (0.0, 86_400.0):
            signed = signer.headers("GET", "/", "", {}, EMPTY, credentials, now_s)
            assert signed["authorization"] == theirs("GET", "/", "", {}, EMPTY, credentials, now_s)
