"""Tests of the obstore tier's error messages, secrets, TLS and cancellations."""

from __future__ import annotations

import asyncio

import obstore
import pytest
from support.papers import make_papers
from support.s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server
from support.workbench import Workbench

from kvtier_sdk import (
    ChunkNotFoundError,
    ConfigError,
    TierAuthError,
    TierCapacityError,
    TierError,
    TierSpec,
    TierTimeoutError,
    TierUnavailableError,
)

KEYS = [index.to_bytes(20, "big") for index in range(8)]


def url_of(endpoint: str, **options: object) -> str:
    given = {
        "service": "s3",
        "endpoint": endpoint,
        "region": REGION,
        "access_key_id": ACCESS_KEY_ID,
        "secret_access_key": SECRET_ACCESS_KEY,
        **options,
    }
    return "obstore://kv/chunks?" + "&".join(f"{name}={value}" for name, value in given.items())


class Answers:
    """An HTTP server with one response to all requests; it is silent if ``status`` is ``None``."""

    def __init__(self, status: int | None, body: str = "", missing_bytes: int = 0) -> None:
        # The server closes the connection ``missing_bytes`` bytes before the body's announced end.
        self.status, self.body, self.missing_bytes = status, body, missing_bytes
        self.requests = 0

    async def __aenter__(self) -> Answers:
        self._server = await asyncio.start_server(self._answer, "127.0.0.1", 0)
        self.endpoint = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *failure: object) -> None:
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            self.requests += 1
            if self.status is None:
                await reader.read()
            head = [f"HTTP/1.1 {self.status} X", "Connection: close", 'ETag: "1"']
            head += ["Last-Modified: Thu, 01 Jan 2026 00:00:00 GMT"]
            head += [f"Content-Length: {len(self.body) + self.missing_bytes}"]
            writer.write("\r\n".join([*head, "", self.body]).encode())
            await writer.drain()
        finally:
            writer.close()


@pytest.fixture
async def bench():
    bench = Workbench()
    yield bench
    await bench.close()


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("obstore://kv", "option 'service' is missing"),
        ("gs://kv?account_name=a", "option 'account_name' is for another service than 'gs'"),
        ("gs://kv?capacity=1GiB", "option 'capacity': give the bucket a lifecycle rule"),
        ("az://kv?account_key=x", "option 'account_key' is given without 'account_name'"),
        ("gs://kv/a/../b", "option 'prefix': 'a/../b' is not a prefix such as 'kv/llama'"),
        ("gs://kv?endpoint=host:80", "option 'endpoint': 'host:80' is not a URL"),
        ("gs://kv:80", "unknown option 'port'"),
    ],
)
def test_a_wrong_option_says_what_to_write(url, complaint):
    with pytest.raises(ConfigError) as caught:
        TierSpec.from_url(url)
    assert complaint in str(caught.value)


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        (403, "<Error><Code>AccessDenied</Code></Error>", TierAuthError, "403 AccessDenied"),
        (401, "", TierAuthError, "401"),
        (404, "<Error><Code>NoSuchKey</Code></Error>", ChunkNotFoundError, "no such chunk"),
        (404, "<Error><Code>NoSuchBucket</Code></Error>", TierUnavailableError, "'bucket'"),
        (503, "<Error><Code>SlowDown</Code></Error>", TierUnavailableError, "503 SlowDown"),
        (507, "", TierCapacityError, "no room"),
        (301, "", TierUnavailableError, "option 'region'"),
        (418, "", TierError, "418"),
        (None, "", TierTimeoutError, "within 'timeout'"),
    ],
)
async def test_each_answer_of_a_server_has_its_error(bench, status, body, kind, text):
    async with Answers(status, body) as server:
        tier = bench.make(url_of(server.endpoint, timeout="300ms"))
        (error,) = await tier.load([bench.empty(KEYS[0])])
    assert isinstance(error, kind)
    assert text in str(error)
    assert "Debug source" not in str(error)
    assert server.requests == 1, "the SDK retries, not obstore"


async def test_a_response_that_breaks_off(bench):
    async with Answers(200, "half", missing_bytes=4) as server:
        tier = bench.make(url_of(server.endpoint))
        (error,) = await tier.load([bench.empty(KEYS[0])])
    assert isinstance(error, TierUnavailableError)
    assert "broke in the middle of a response" in str(error)


async def test_a_server_that_is_away(bench):
    with pytest.raises(TierUnavailableError, match="Connection refused"):
        await bench.open(url_of("http://127.0.0.1:1"))


async def test_a_server_without_tls(bench, s3):
    with pytest.raises(TierUnavailableError, match="write 'http:' in option 'endpoint'"):
        await bench.open(url_of(s3.endpoint.replace("http:", "https:")))


async def test_a_panic_is_an_error_of_the_call(bench, s3, monkeypatch):
    class PanicException(BaseException):
        pass

    async def panics(*_: object) -> None:
        raise PanicException("index out of bounds")

    tier = await bench.open(url_of(s3.endpoint))
    monkeypatch.setattr(obstore, "head_async", panics)
    with pytest.raises(TierError, match="index out of bounds"):
        await tier.lookup(KEYS[:1], bench.request)


async def test_chunks_over_tls(bench, tmp_path):
    papers = make_papers(tmp_path)
    cert, key = papers.server
    with S3Server(tmp_path, "--cert", cert, "--key", key, scheme="https") as server:
        with pytest.raises(TierUnavailableError, match="set option 'tls_ca'"):
            await bench.open(url_of(server.endpoint))
        tier = await bench.open(url_of(server.endpoint, tls_ca=papers.ca))
        assert await tier.store([bench.full(KEYS[0])]) == [None]
        loaded = bench.empty(KEYS[0])
        assert await tier.load([loaded]) == [None]
        assert bench.holds(loaded)
        with pytest.raises(TierError, match="400"):
            await bench.open(url_of(server.endpoint.replace("https:", "http:")))
        tier = await bench.open(url_of(server.endpoint, tls_verify="false"))
        assert await tier.lookup(KEYS[:2], bench.request) == [True, False]


async def test_a_changed_secret_is_used_by_the_next_call(bench, s3, tmp_path):
    file = tmp_path / "secret"
    file.write_text("wrong")
    given = url_of(s3.endpoint).replace("secret_access_key=", "secret_access_key_file=")
    tier = bench.make(given.replace(SECRET_ACCESS_KEY, str(file)))
    with pytest.raises(TierAuthError):
        await tier.open()
    file.write_text(SECRET_ACCESS_KEY)
    assert tier.config.secret_access_key.read_again()  # the runner does this after a refusal
    await tier.open()
    await tier.close()


async def test_a_cancelled_store_waits_for_its_request(bench):
    async with Answers(None) as server:
        tier = bench.make(url_of(server.endpoint, timeout="500ms"))
        task = asyncio.ensure_future(tier.store([bench.full(KEYS[0])]))
        while not server.requests:
            await asyncio.sleep(0.01)
        for _ in range(2):  # not even a second cancellation ends the wait
            task.cancel()
            await asyncio.sleep(0.05)
            assert not task.done()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert "obstore" not in {task.get_name() for task in asyncio.all_tasks()}
