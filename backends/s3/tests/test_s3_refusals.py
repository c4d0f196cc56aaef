import pytest
from support.guarded import GuardedBuffers

from kvtier_s3.faults import Faults, Refusal
from kvtier_sdk import (
    ChunkError,
    ChunkNotFoundError,
    ConfigError,
    CorruptChunkError,
    TierAuthError,
    TierCapacityError,
    TierError,
    TierUnavailableError,
    Transfer,
)

KEYS = [index.to_bytes(20, "big") for index in range(20)]


def says(code: str, message: str = "", **more: str) -> str:
    rest = "".join(f"<{name}>{value}</{name}>" for name, value in more.items())
    rest = f"<Code>{code}</Code><Message>{message}</Message>{rest}"
    return f"<?xml version='1.0'?>\n<Error>{rest}</Error>"


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("access_key_id", "Access Key Id you provided does not exist"),
        ("secret_access_key", "the secret access key does not fit the access key id"),
    ],
)
async def test_wrong_credentials(bench, option, complaint):
    with pytest.raises(TierAuthError, match=complaint) as caught:
        await bench.open(bench.url_of(**{option: "w" * 20}))
    assert not caught.value.retryable
    assert "w" * 20 not in str(caught.value)


async def test_credentials_that_lose_their_rights_to_objects(bench, scripted, make_reply):
    tier = await bench.open(scripted.url(), connections=1)
    refusal = make_reply(403, says("AccessDenied", "Access Denied"))
    scripted.answers = [refusal, refusal, make_reply(403)]
    (loaded,) = await tier.load([bench.empty(KEYS[0])])
    (stored,) = await bench.put(tier, KEYS[0])
    for verdict in (loaded, stored):
        assert isinstance(verdict, TierAuthError)
        assert isinstance(verdict, ChunkError)
        assert str(verdict) == "the server answered 403 AccessDenied: Access Denied"
    with pytest.raises(TierAuthError):
        await bench.has(tier, KEYS[0])
    assert await bench.put(tier, KEYS[0]) == [None]
    assert scripted.connections == 2  # one for chunks, one for lookups


async def test_a_machine_whose_clock_is_wrong(bench, scripted, make_reply):
    body = says("RequestTimeTooSkewed", "The difference is too large.")
    scripted.answers = [make_reply(403, body, Date="Sat, 21 Nov 2026 10:00:00 GMT")]
    with pytest.raises(TierAuthError) as caught:
        await bench.open(scripted.url())
    assert str(caught.value).startswith(
        "this machine's clock is wrong, seen from the server, where it is Sat, 21 Nov 2026 10:00:00"
    )
    assert not caught.value.retryable


@pytest.mark.parametrize(
    ("status", "code", "more", "complaint"),
    [
        (
            400,
            "AuthorizationHeaderMalformed",
            {"Region": "eu-west-1"},
            r"^bucket 'kv' is in region 'eu-west-1', not 'us-east-1'; set option 'region' to "
            r"'eu-west-1' \(the server answered 400 AuthorizationHeaderMalformed\)$",
        ),
        (301, "PermanentRedirect", {}, "check options 'region' and 'endpoint'"),
        (400, "IllegalLocationConstraintException", {}, "check options 'region' and 'endpoint'"),
        (400, "InvalidBucketName", {}, "'kv' is not a valid name of a bucket"),
        (400, "XAmzContentSHA256Mismatch", {}, "set option 'sign_payload' to true"),
    ],
)
async def test_wrong_settings(bench, scripted, make_reply, status, code, more, complaint):
    scripted.answers = [make_reply(status, says(code, **more))]
    with pytest.raises(ConfigError, match=complaint):
        await bench.open(scripted.url())


async def test_a_region_that_is_told_by_a_header(bench, scripted, make_reply):
    scripted.answers = [make_reply(301, x_amz_bucket_region="eu-north-1")]
    with pytest.raises(ConfigError, match="set option 'region' to 'eu-north-1'"):
        await bench.open(scripted.url())


NO_S3 = "<html><h1>404 Not Found</h1></html>"


@pytest.mark.parametrize("body", ["", NO_S3, says("NoSuchKey")])
async def test_what_is_no_s3_service_is_no_missing_chunk(bench, scripted, make_reply, body):
    scripted.answers = [make_reply(404, body)]
    with pytest.raises(
        ConfigError, match="is not an S3 service, or not at this path; .*'endpoint'"
    ):
        await bench.open(scripted.url())
    tier = await bench.open(scripted.url(connections=1))
    scripted.answers = [make_reply(404, body)]
    (stored,) = await bench.put(tier, KEYS[0])
    assert not isinstance(stored, ChunkNotFoundError)
    assert "option 'endpoint'" in str(stored)
    scripted.answers = [make_reply(404, body)]
    with pytest.raises(TierError, match="option 'endpoint'"):
        await tier.delete(KEYS)
    # A load or a lookup treats these responses as a missing chunk.
    scripted.answers = [make_reply(404, body), make_reply(404)]
    (loaded,) = await tier.load([bench.empty(KEYS[0])])
    assert type(loaded) is ChunkNotFoundError
    assert not await tier.contains_chunk(KEYS[0])


async def test_a_bucket_that_goes_away_is_an_error_of_its_chunks(bench, scripted, make_reply):
    tier = await bench.open(scripted.url())
    scripted.answers = [make_reply(404, says("NoSuchBucket"))]
    (verdict,) = await tier.load([bench.empty(KEYS[0])])
    assert isinstance(verdict, TierError)
    assert not isinstance(verdict, ChunkNotFoundError)
    assert "bucket 'kv' does not exist" in str(verdict)


@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "SlowDown"), (502, ""), (400, "RequestTimeout"), (409, "ConditionalRequestConflict")],
)
async def test_what_passes_is_worth_another_try(bench, scripted, make_reply, status, code):
    tier = await bench.open(scripted.url(), connections=1)
    refusal = make_reply(status, says(code, "Please reduce your request rate.") if code else "")
    scripted.answers = [refusal, refusal]
    (loaded,) = await tier.load([bench.empty(KEYS[0])])
    (stored,) = await bench.put(tier, KEYS[0])
    for verdict in (loaded, stored):
        assert type(verdict) is TierUnavailableError
        assert verdict.retryable
        assert f"the server answered {status}" in str(verdict)


async def test_a_chunk_that_is_there_already_is_stored(bench, scripted, make_reply):
    tier = await bench.open(scripted.url(), connections=1)
    scripted.answers = [make_reply(412, says("PreconditionFailed"))]
    assert await bench.put(tier, KEYS[0]) == [None]
    assert scripted.requests[-1].headers["if-none-match"] == "*"
    assert scripted.requests[-1].body == bench.content(KEYS[0])
    # ``replace`` is set for a chunk that failed to load, so the store is unconditional.
    assert await tier.store([bench.full(KEYS[0], replace=True)]) == [None]
    assert "if-none-match" not in scripted.requests[-1].headers
    # The second request wrote the manifest. Each open overwrites the manifest unconditionally.
    assert "if-none-match" not in scripted.requests[1].headers


async def test_a_server_without_conditional_put_is_asked_once(bench, scripted, make_reply):
    tier = await bench.open(scripted.url(), connections=1)
    before = len(scripted.requests)
    scripted.answers = [make_reply(501, says("NotImplemented", "A header you provided..."))]
    assert await bench.put(tier, *KEYS[:3]) == [None] * 3
    asked = scripted.requests[before:]
    assert ["if-none-match" in request.headers for request in asked] == [True] + [False] * 3
    assert {request.body for request in asked[1:]} == {bench.content(key) for key in KEYS[:3]}


async def test_credentials_that_may_not_write_serve_reads(bench, scripted, make_reply, caplog):
    scripted.answers = [make_reply(200), make_reply(403, says("AccessDenied", "read only"))]
    tier = await bench.open(scripted.url(), connections=1)
    assert "the manifest was not written: the server answered 403 AccessDenied: read only" in (
        caplog.text
    )
    scripted.answers = [make_reply(200, bench.content(KEYS[0]))]
    assert await bench.loads(tier, KEYS[0])


async def test_a_server_that_answers_before_it_has_read_the_chunk(bench, scripted, make_reply):
    bench.chunk_bytes = 32 * 2**20  # more than the sockets' buffers hold
    tier = await bench.open(scripted.url(), connections=1)
    scripted.reads_bodies = False
    scripted.answers = [make_reply(503, says("SlowDown", "Reduce your request rate."))]
    source = bench.full(KEYS[0])
    (verdict,) = await tier.store([source])
    assert isinstance(verdict, TierUnavailableError)
    # The connection is closed, because the rest of the chunk was never sent.
    scripted.reads_bodies = True
    before = scripted.connections
    scripted.answers = [make_reply(200, bench.content(KEYS[0]))]
    assert await bench.loads(tier, KEYS[0])
    assert scripted.connections == before + 1


@pytest.mark.parametrize(
    ("length", "sent", "kind"),
    [
        (100_064, 50_000, TierUnavailableError),  # the connection ends early
        (100_064, 0, TierUnavailableError),
        (50_000, 49_999, TierUnavailableError),  # the same, for a compressed chunk
        (64, 64, CorruptChunkError),  # the object has no payload
        (0, 0, CorruptChunkError),
        (100_065, 100_065, CorruptChunkError),  # the object is too long
        (1_000, 100_064, TierUnavailableError),  # the body exceeds its stated length
    ],
)
async def test_bodies_that_are_not_as_they_should_be(bench, scripted, length, sent, kind):
    tier = await bench.open(scripted.url(), connections=1)
    head = f"HTTP/1.1 200 OK\r\nContent-Length: {length}\r\n\r\n".encode()
    scripted.answers = [head + b"x" * sent, None]
    memory = GuardedBuffers(bench.header_bytes, bench.payload_bytes)
    target = Transfer(KEYS[0], bench.request, *memory.buffers)
    (verdict,) = await tier.load([target])
    assert type(verdict) is kind
    assert memory.is_guarded()
    assert await bench.put(tier, KEYS[0]) == [None]


@pytest.mark.parametrize("chunk_bytes", [100_000, 2**20])
@pytest.mark.parametrize("is_chunked", [True, False])
async def test_a_body_of_unsaid_length_is_no_damage(bench, scripted, chunk_bytes, is_chunked):
    # A proxy can omit the length of an intact object, so the tier must not delete the object.
    bench.chunk_bytes = chunk_bytes
    tier = await bench.open(scripted.url(connections=1))
    body = bench.content(KEYS[0])
    if is_chunked:
        piece = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
        scripted.answers = [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + piece]
    else:
        scripted.answers = [b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + body, None]
    (verdict,) = await tier.load([bench.empty(KEYS[0])])
    assert type(verdict) is TierError
    assert "does not say how long an object is" in str(verdict)
    assert await bench.put(tier, KEYS[0]) == [None]


async def test_objects_that_cannot_be_deleted(bench, scripted, make_reply):
    tier = await bench.open(scripted.url())

    def answer(*codes: str) -> bytes:
        errors = "".join(
            f"<Error><Key>k</Key><Code>{code}</Code><Message>no</Message></Error>" for code in codes
        )
        return make_reply(200, f"<DeleteResult>{errors}</DeleteResult>")

    # If errors are mixed, the permanent error is raised.
    for codes in (["AccessDenied"], ["NoSuchKey", "SlowDown", "AccessDenied", "InternalError"]):
        scripted.answers = [answer(*codes)]
        with pytest.raises(TierAuthError, match="AccessDenied: no"):
            await tier.delete(KEYS)
    scripted.answers = [answer("NoSuchKey", "SlowDown")]
    with pytest.raises(TierUnavailableError):
        await tier.delete(KEYS)
    scripted.answers = [answer("NoSuchKey")]
    await tier.delete(KEYS)


def listed(size: str) -> str:
    return f"<ListBucketResult><Contents><Key>x</Key>{size}</Contents></ListBucketResult>"


async def test_an_object_that_is_denied_is_one_object(bench, scripted, make_reply):
    tier = await bench.open(scripted.url(), lookup_connections=1)
    scripted.answers = [make_reply(200), make_reply(403), make_reply(404)]
    assert await tier.lookup(KEYS[:3], bench.request) == [True, False, False]
    scripted.answers = [make_reply(403, says("AccessDenied"))]
    with pytest.raises(TierAuthError) as caught:
        await anext(tier.scan())
    assert not isinstance(caught.value, ChunkError)


@pytest.mark.parametrize(
    ("status", "body"), [(200, listed("<Size>many</Size>")), (200, listed("")), (301, "")]
)
async def test_malformed_responses_are_not_auth_errors(bench, scripted, make_reply, status, body):
    tier = await bench.open(scripted.url())
    scripted.answers = [make_reply(status, body)] * 200
    with pytest.raises(TierError, match="the server's answer is invalid: ") as caught:
        await anext(tier.scan())
    assert type(caught.value) is TierError


@pytest.mark.parametrize(
    ("status", "code", "kind", "retryable"),
    [
        (403, "ExpiredToken", TierAuthError, False),
        (400, "InvalidToken", TierAuthError, False),
        (401, "Unauthorized", TierAuthError, False),
        (403, "SomethingNew", TierAuthError, False),
        (507, "InsufficientStorage", TierCapacityError, False),
        (403, "QuotaExceeded", TierCapacityError, False),
        (400, "EntityTooLarge", TierCapacityError, False),
        (403, "InvalidObjectState", ChunkError, False),
        (400, "ThrottlingException", TierUnavailableError, True),
        (400, "KMS.ThrottlingException", TierUnavailableError, True),
        (400, "RequestThrottled", TierUnavailableError, True),
        (400, "TooManyRequestsException", TierUnavailableError, True),
        (403, "RequestLimitExceeded", TierUnavailableError, True),
        (400, "ExpiredTokenException", TierAuthError, False),
        (504, "504", TierUnavailableError, True),
        (409, "OperationAborted", TierUnavailableError, True),
        (501, "NotImplemented", TierError, False),
        (400, "KMS.DisabledException", TierError, False),
    ],
)
def test_every_refusal_has_its_error(status, code, kind, retryable):
    faults = Faults("kv", "http://h", "us-east-1")
    error = faults.error(Refusal(status, code, "why", "", ""))
    assert type(error) is kind
    assert error.retryable is retryable
    assert f"{status} {code}: why" in str(error)
