import asyncio
import contextlib
import hashlib
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiobotocore.config import AioConfig
from aiobotocore.session import get_session
from support.loops import loop_factories
from support.proxy import Proxy
from support.s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server
from support.workbench import Workbench

_places = itertools.count()


pytest_asyncio_loop_factories = loop_factories


@pytest.fixture(autouse=True)
def no_settings_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE", "AWS_REGION"):
        monkeypatch.delenv(name, raising=False)


class S3Bench(Workbench):
    def __init__(self, server: S3Server) -> None:
        super().__init__()
        self.prefix = f"run-{next(_places)}"
        self.use(server)

    def use(self, server: S3Server) -> None:
        self.server = server
        server.make_shards(f"kv/{self.prefix}/{self.namespace.fingerprint}")

    @property
    def url(self) -> str:
        return self.url_of()

    def url_of(self, **options: object) -> str:
        return self.server.tier_url(f"kv/{self.prefix}", **options)

    def name(self, key: bytes) -> str:
        shard = hashlib.blake2b(key, digest_size=1).hexdigest()
        return f"{self.prefix}/{self.namespace.fingerprint}/{shard}/{key.hex()}.kv"

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Any]:
        async with get_session().create_client(
            "s3",
            endpoint_url=self.server.endpoint,
            region_name=REGION,
            aws_access_key_id=ACCESS_KEY_ID,
            aws_secret_access_key=SECRET_ACCESS_KEY,
            config=AioConfig(s3={"addressing_style": "path"}),
        ) as client:
            yield client

    async def overwrite(self, key: bytes, content: bytes) -> None:
        async with self.client() as client:
            await client.put_object(Bucket="kv", Key=self.name(key), Body=content)

    async def stored(self, name: str) -> bytes:
        async with self.client() as client:
            answer = await client.get_object(Bucket="kv", Key=name)
            async with answer["Body"] as body:
                content: bytes = await body.read()
        return content


def reply(status: int, body: bytes | str = b"", **headers: str) -> bytes:
    body = body.encode() if isinstance(body, str) else body
    lines = [f"HTTP/1.1 {status} Word", f"Content-Length: {len(body)}"]
    lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, "", ""]).encode() + body


@dataclass
class Request:
    method: str
    target: str
    headers: dict[str, str]
    body: bytes = b""


@pytest.fixture
def make_reply() -> Callable[..., bytes]:
    return reply


@dataclass
class Scripted:
    """An HTTP server that sends each of the given responses once, and then only status 200."""

    requests: list[Request] = field(default_factory=list)
    #: The next responses; ``None`` closes the connection.
    answers: list[bytes | None] = field(default_factory=list)
    #: True if the server reads a request's body before it responds.
    reads_bodies: bool = True
    #: The server responds to a PUT only after this event is set.
    answers_puts: asyncio.Event = field(default_factory=asyncio.Event)
    connections: int = 0
    _server: asyncio.Server | None = None
    _writers: list[asyncio.StreamWriter] = field(default_factory=list)

    async def start(self) -> str:
        self.answers_puts.set()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self.port}"

    @property
    def port(self) -> int:
        assert self._server is not None
        port: int = self._server.sockets[0].getsockname()[1]
        return port

    def url(self, **options: object) -> str:
        given = {"endpoint": f"http://127.0.0.1:{self.port}", "access_key_id": "a" * 16}
        given |= {"secret_access_key": "s" * 16} | options  # type: ignore[assignment]
        return "s3://kv?" + "&".join(f"{name}={value}" for name, value in given.items())

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.append(writer)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while await self._exchange(reader, writer):
                pass
        writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        method, target, _ = first.split(" ")
        fields = (line.split(": ", 1) for line in lines)
        request = Request(method, target, {name.lower(): value for name, value in fields})
        self.requests.append(request)
        if self.reads_bodies:
            request.body = await reader.readexactly(int(request.headers.get("content-length", 0)))
        if method == "PUT":
            await self.answers_puts.wait()
        answer = (
            self.answers.pop(0) if self.answers else b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"
        )
        if answer is None:
            return False
        writer.write(answer)
        await writer.drain()
        if self.answers[:1] == [None]:
            self.answers.pop(0)
            return False
        return True


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
async def bench(server: S3Server) -> AsyncIterator[S3Bench]:
    bench = S3Bench(server)
    yield bench
    await bench.close()


@pytest.fixture
def make_bench() -> type[S3Bench]:
    return S3Bench


@pytest.fixture
async def proxy(server: S3Server) -> AsyncIterator[Proxy]:
    proxy = Proxy(server.port, "http")
    yield proxy
    await proxy.close()


@pytest.fixture
async def scripted() -> AsyncIterator[Scripted]:
    scripted = Scripted()
    await scripted.start()
    yield scripted
    await scripted.close()
