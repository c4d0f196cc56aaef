import base64
import json
import logging
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.papers import make_papers
from support.s3_server import ACCESS_KEY_ID, SECRET_ACCESS_KEY, S3Server

from kvtier_s3.bucket import Bucket
from kvtier_sdk import (
    ConfigError,
    SystemClock,
    TierAuthError,
    TierError,
    TierSpec,
    TierUnavailableError,
)

KEYS = [index.to_bytes(20, "big") for index in range(20)]


async def works(bench, tier) -> bool:
    return (
        await bench.put(tier, *KEYS) == [None] * 20
        and await bench.loads(tier, *KEYS)
        and len([entry async for entry in tier.scan()]) == 20
    )


@pytest.fixture
def environment(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_ACCESS_KEY)
    return monkeypatch


async def test_credentials_of_the_environment(bench, environment):
    environment.setenv("AWS_ENDPOINT_URL", bench.server.endpoint)
    assert await works(bench, await bench.open(f"s3://kv/{bench.prefix}"))


async def test_credentials_of_the_environment_cannot_add_a_header(bench, scripted, environment):
    environment.setenv("AWS_SESSION_TOKEN", "hunter2\r\nx-evil: 1")
    environment.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{scripted.port}")
    with pytest.raises(TierAuthError, match="the token that was found contains a") as caught:
        await bench.open("s3://kv")
    assert "hunter2" not in str(caught.value)
    assert scripted.requests == []


async def test_an_endpoint_of_the_environment_is_held_to_the_rules(bench, scripted, environment):
    key = base64.b64encode(bytes(32)).decode()
    environment.setenv("AWS_ENDPOINT_URL_S3", f"HTTP://127.0.0.1:{scripted.port}")
    with pytest.raises(ConfigError, match="'sse_secret_key' cannot be sent .* without TLS"):
        await bench.open("s3://kv", sse_secret_key=key)
    environment.setenv("AWS_ENDPOINT_URL_S3", f"http://me:hunter2@127.0.0.1:{scripted.port}")
    with pytest.raises(ConfigError, match="option 'endpoint': ") as caught:
        await bench.open("s3://kv")
    assert "hunter2" not in str(caught.value)
    assert scripted.requests == []


async def test_credentials_endpoint_and_region_of_a_profile(bench, scripted, tmp_path):
    (tmp_path / "config").write_text(
        f"[profile kv]\nregion = eu-west-3\nendpoint_url = http://127.0.0.1:{scripted.port}\n"
        f"aws_access_key_id = {'p' * 16}\naws_secret_access_key = {'s' * 16}\n"
    )
    await bench.open("s3://kv?profile=kv")
    assert "/eu-west-3/s3/" in scripted.requests[0].headers["authorization"]
    assert "p" * 16 in scripted.requests[0].headers["authorization"]
    with pytest.raises(ConfigError, match=r"profile \(cv\) could not .*; check option 'profile'"):
        await bench.open("s3://kv?profile=cv")


async def test_an_access_point():
    arn = "arn:aws:s3:eu-west-1:123456789012:accesspoint/kv"
    options = TierSpec.from_url("s3:", bucket=arn, access_key_id="a", secret_access_key="s").config
    bucket = Bucket(options, SystemClock(), logging.getLogger("test"))
    await bucket.open()
    await bucket.close()
    assert bucket.place.host == "kv-123456789012.s3-accesspoint.eu-west-1.amazonaws.com"
    assert (bucket.place.path, bucket.place.region) == ("/", "eu-west-1")


async def test_a_region_that_is_none(bench):
    with pytest.raises(ConfigError, match="^option 'region': .*'eu_west'"):
        await bench.open(bench.url_of(region="eu_west"))


async def test_temporary_credentials_are_sent_whole_and_renewed(bench, scripted, tmp_path):
    # Each call of the script prints new credentials, which expire soon.
    script = tmp_path / "process.py"
    script.write_text(
        "import datetime, json, pathlib\n"
        f"calls = pathlib.Path({str(tmp_path / 'calls')!r})\n"
        "calls.open('a').write('x')\n"
        "soon = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(minutes=5)\n"
        "print(json.dumps({'Version': 1, 'AccessKeyId': 'a' * 16, 'SecretAccessKey': 's' * 16,\n"
        "    'SessionToken': 'token-%d' % calls.stat().st_size, 'Expiration': soon.isoformat()}))\n"
    )
    (tmp_path / "config").write_text(
        f"[default]\ncredential_process = {sys.executable} {script}\nregion = us-east-1\n"
    )
    tier = await bench.open(f"s3://kv?endpoint=http://127.0.0.1:{scripted.port}")
    assert await bench.put(tier, *KEYS[:3]) == [None] * 3
    tokens = [request.headers["x-amz-security-token"] for request in scripted.requests]
    assert len(set(tokens)) > 1
    assert tokens[-1] == f"token-{(tmp_path / 'calls').stat().st_size}"
    signed = scripted.requests[-1].headers["authorization"]
    assert "x-amz-security-token" in signed


@pytest.fixture(scope="module")
def papers(tmp_path_factory) -> SimpleNamespace:
    return make_papers(tmp_path_factory.mktemp("papers"))


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory, papers):
    cert, key = papers.server
    directory: Path = tmp_path_factory.mktemp("tls")
    with S3Server(directory, "--cert", cert, "--key", key, scheme="https") as server:
        yield server


@pytest.mark.parametrize("chunk_bytes", [1, 2**22 + 1])
async def test_tls_with_a_private_ca(bench, tls_server, papers, chunk_bytes):
    bench.use(tls_server)
    bench.chunk_bytes = chunk_bytes
    assert await works(bench, await bench.open(bench.url, tls_ca=papers.ca))


async def test_tls_with_the_ca_of_the_environment(bench, tls_server, papers, monkeypatch):
    bench.use(tls_server)
    monkeypatch.setenv("AWS_CA_BUNDLE", papers.ca)
    assert await works(bench, await bench.open(bench.url))


async def test_tls_that_is_not_trusted(bench, tls_server, papers):
    bench.use(tls_server)
    with pytest.raises(
        TierUnavailableError, match="not trusted: .*'tls_ca'.*'tls_verify'"
    ) as caught:
        await bench.open(bench.url)
    assert not caught.value.retryable
    with pytest.raises(ConfigError, match="option 'tls_ca': /nowhere cannot be used"):
        await bench.open(bench.url, tls_ca="/nowhere")
    assert await works(bench, await bench.open(bench.url, tls_verify=False))


async def test_tls_to_a_server_that_speaks_none(bench):
    endpoint = bench.server.endpoint.replace("http", "https")
    with pytest.raises(TierUnavailableError) as caught:
        await bench.open(bench.server.tier_url("kv", endpoint=endpoint))
    assert str(caught.value) == (
        f"127.0.0.1:{bench.server.port} does not speak TLS; "
        "write 'http://' in option 'endpoint', or another port"
    )
    assert not caught.value.retryable


async def test_tls_with_the_certificate_of_another_host(bench, tmp_path, papers):
    cert, key = papers.client
    with S3Server(tmp_path, "--cert", cert, "--key", key, scheme="https") as server:
        bench.use(server)
        with pytest.raises(TierUnavailableError) as caught:
            await bench.open(bench.url, tls_ca=papers.ca)
        assert not caught.value.retryable
        assert "is for another host; name that one in option 'endpoint'" in str(caught.value)
        assert "'tls_verify'" in str(caught.value)
        assert await works(bench, await bench.open(bench.url, tls_verify=False))


async def test_a_host_that_is_named_after_its_bucket(bench, tmp_path):
    # Virtual addressing puts the bucket before the host: 127 and 0.0.1 make 127.0.0.1.
    with S3Server(tmp_path, "--force-path-style=false", buckets=("127",)) as server:
        url = server.tier_url(
            "127", endpoint=f"http://0.0.1:{server.port}", addressing="virtual", prefix=bench.prefix
        )
        server.make_shards(f"127/{bench.prefix}/{bench.namespace.fingerprint}")
        tier = await bench.open(url)
        assert await bench.put(tier, *KEYS) == [None] * 20
        assert await bench.loads(tier, *KEYS)
        assert (tmp_path / "buckets" / "127" / bench.name(KEYS[0])).exists()
        await bench.close()


@pytest.fixture
def through_proxy(scripted, monkeypatch):
    for name in ("http_proxy", "https_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{scripted.port}")
    return scripted.requests


async def test_no_request_to_a_bucket_goes_through_a_proxy(bench, through_proxy):
    tier = await bench.open(bench.url)
    assert await works(bench, tier)
    await tier.delete(KEYS)
    assert await bench.has(tier, *KEYS) == [False] * 20
    assert through_proxy == []
    with pytest.raises(TierUnavailableError, match="a proxy is not used for the bucket: HTTPS"):
        await bench.open(bench.server.tier_url("kv", endpoint="https://127.0.0.1:1"))


async def test_requests_for_credentials_go_through_a_proxy(monkeypatch, tmp_path, through_proxy):
    # Credentials come from another host, for which all AWS tools use the proxy.
    (tmp_path / "token").write_text("token")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::123456789012:role/kv")
    monkeypatch.setenv("AWS_ENDPOINT_URL_STS", "http://sts.invalid")
    options = TierSpec.from_url("s3://kv?endpoint=http://127.0.0.1:1").config
    bucket = Bucket(options, SystemClock(), logging.getLogger("test"))
    with pytest.raises(TierError, match="is invalid"):  # the scripted response is not from STS
        await bucket.open()
    await bucket.close()
    assert through_proxy[0].target.startswith("http://sts.invalid/")


async def test_signed_payloads(bench):
    assert await works(bench, await bench.open(bench.url_of(sign_payload="yes")))


async def test_a_payload_is_left_out_of_the_signature_unless_asked_for(bench, scripted):
    for option, is_signed in (("no", False), ("yes", True)):
        tier = await bench.open(scripted.url(sign_payload=option))
        await bench.put(tier, KEYS[0])
        hashed = scripted.requests[-1].headers["x-amz-content-sha256"]
        assert (hashed != "UNSIGNED-PAYLOAD") is is_signed
        # kvtier checks chunks itself, so the tier sends no checksum.
        assert not any("checksum" in name for name in scripted.requests[-1].headers)


async def test_what_is_written_says_how_it_is_encrypted(bench, scripted):
    tier = await bench.open(scripted.url(sse="aws:kms", sse_kms_key_id="key-1"))
    await bench.put(tier, KEYS[0])
    await bench.has(tier, KEYS[0])
    _, manifest, put, head = scripted.requests
    for request in (manifest, put):
        assert request.headers["x-amz-server-side-encryption"] == "aws:kms"
        assert request.headers["x-amz-server-side-encryption-aws-kms-key-id"] == "key-1"
        assert "x-amz-server-side-encryption-aws-kms-key-id" in request.headers["authorization"]
    assert not any("encryption" in name for name in head.headers)


def brought(expires_in_s: float) -> str:
    until = datetime.now(UTC) + timedelta(seconds=expires_in_s)
    keys = {"AccessKeyId": "a" * 16, "SecretAccessKey": "hunter2" * 4, "SessionToken": "t"}
    return json.dumps({"Version": 1, **keys, "Expiration": until.isoformat()})


@pytest.mark.parametrize(
    "said",
    [
        "",
        "no JSON: hunter2",
        '["hunter2"]',
        '{"Version": 1}',
        brought(-10),
        brought(300).replace('Expiration": "', 'Expiration": "never '),
    ],
)
async def test_credentials_that_are_none(bench, scripted, tmp_path, said):
    config, answer = tmp_path / "config", tmp_path / "answer"
    config.write_text(f"[default]\ncredential_process = /bin/cat {answer}\n")
    url = f"s3://kv?connections=1&endpoint=http://127.0.0.1:{scripted.port}"
    answer.write_text(said)
    with pytest.raises(TierAuthError) as caught:
        await bench.open(url)
    assert not caught.value.retryable
    assert "redential" in str(caught.value)
    assert "hunter2" not in str(caught.value)
    # Renewed credentials are checked as well.
    answer.write_text(brought(300))
    tier = await bench.open(url)
    answer.write_text(said)
    assert [type(verdict) for verdict in await bench.put(tier, KEYS[0])] == [TierAuthError]
    with pytest.raises(TierAuthError):
        await tier.delete(KEYS)
    with pytest.raises(TierAuthError):
        await anext(tier.scan())


@pytest.mark.parametrize("program", ["/bin/false", "/nowhere"])
async def test_credentials_that_cannot_be_had(bench, scripted, tmp_path, program):
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {program}\n")
    with pytest.raises(TierAuthError):
        await bench.open(f"s3://kv?endpoint=http://127.0.0.1:{scripted.port}")
