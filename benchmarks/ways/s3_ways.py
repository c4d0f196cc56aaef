"""S3: the tier, aiobotocore, obstore, and bare sockets to the same server."""

from __future__ import annotations

import itertools
import shutil
import socket
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import botocore.session
import obstore
from aiobotocore.session import get_session
from botocore.config import Config
from obstore.store import S3Store
from support.s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server

from ways.sockets import fill, in_threads, send_all
from ways.tier_way import TierWay
from ways.way import Subject, Way, Work

_BUCKET = "kv"
_HEAD_END = b"\r\n\r\n"
_HEAD_BYTES = 4096


class _Client(Way):
    """A client of the server.

    Args:
        work: the chunks to move.
        endpoint: the server's.
        place: prefix of its objects' names.
    """

    def __init__(self, work: Work, endpoint: str, place: str) -> None:
        super().__init__(work)
        self._endpoint = endpoint
        self._place = place

    def _name(self, number: int) -> str:
        return f"{self._place}/{self.name}/{number:020}"

    def _credentials(self) -> dict[str, Any]:
        return {
            "aws_access_key_id": ACCESS_KEY_ID,
            "aws_secret_access_key": SECRET_ACCESS_KEY,
            "region_name": REGION,
            "endpoint_url": self._endpoint,
        }


class Aiobotocore(_Client):
    """``put_object`` and ``get_object``, as many at a time as the tier has connections."""

    name = "aiobotocore"

    async def open(self) -> None:
        self._opened = AsyncExitStack()
        made = get_session().create_client("s3", **self._credentials())
        self._client = await self._opened.enter_async_context(made)

    async def close(self) -> None:
        await self._opened.aclose()

    async def store(self) -> None:
        await self.work.each(
            lambda number: self._client.put_object(
                Bucket=_BUCKET, Key=self._name(number), Body=self.work.value(number)
            )
        )

    async def load(self) -> None:
        async def load(number: int) -> None:
            answer = await self._client.get_object(Bucket=_BUCKET, Key=self._name(number))
            async with answer["Body"] as body:
                await body.read()

        await self.work.each(load)


class Obstore(_Client):
    """obstore's ``put_async`` and ``get_async``."""

    name = "obstore"

    async def open(self) -> None:
        self._store = S3Store(
            _BUCKET,
            endpoint=self._endpoint,
            access_key_id=ACCESS_KEY_ID,
            secret_access_key=SECRET_ACCESS_KEY,
            region=REGION,
            # As in the tier: a payload's digest costs more than all else.
            unsigned_payload=True,
            client_options={"allow_http": True},
        )

    async def store(self) -> None:
        await self.work.each(
            lambda number: obstore.put_async(
                self._store, self._name(number), self.work.value(number)
            )
        )

    async def load(self) -> None:
        async def load(number: int) -> None:
            answer = await obstore.get_async(self._store, self._name(number))
            await answer.bytes_async()

        await self.work.each(load)


class BareSockets(_Client):
    """The limit: requests signed beforehand, blocking sockets in as many threads."""

    name = "bare sockets"

    async def open(self) -> None:
        place = urlsplit(self._endpoint)
        self._address = place.hostname, place.port
        client = botocore.session.get_session().create_client(
            "s3", config=Config(signature_version="s3v4"), **self._credentials()
        )
        self._heads = {
            operation: [self._head(client, operation, number) for number in range(self.work.keys)]
            for operation in ("put_object", "get_object")
        }
        # As for the tier's shards; the other two ask again.
        client.put_object(Bucket=_BUCKET, Key=self._name(0))
        client.close()

    def _head(self, client: Any, operation: str, number: int) -> bytes:
        what = {"Bucket": _BUCKET, "Key": self._name(number)}
        url = urlsplit(client.generate_presigned_url(operation, Params=what))
        length_bytes = self.work.object_bytes if operation == "put_object" else 0
        return (
            f"{operation[:3].upper()} {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n"
            f"Content-Length: {length_bytes}\r\n\r\n"
        ).encode()

    async def store(self) -> None:
        heads = iter(self._heads["put_object"])

        def lane(slots: list[list[memoryview]]) -> None:
            with socket.create_connection(self._address) as sock:
                for head, buffers in zip(heads, itertools.cycle(slots), strict=False):
                    send_all(sock, [head, *buffers])
                    _answer(sock)

        in_threads(lane, self.work.lanes())

    async def load(self) -> None:
        heads = iter(self._heads["get_object"])

        def lane(slots: list[list[memoryview]]) -> None:
            with socket.create_connection(self._address) as sock:
                for head, buffers in zip(heads, itertools.cycle(slots), strict=False):
                    send_all(sock, [head])
                    # What came with the response's head is the start of the object.
                    left_bytes = self.work.object_bytes - len(_answer(sock))
                    fill(sock, [buffers[1][:left_bytes]])

        in_threads(lane, self.work.lanes())


def _answer(sock: socket.socket) -> bytes:
    """Receive the head of a response, and return the bytes behind it."""
    text = b""
    while _HEAD_END not in text:
        piece = sock.recv(_HEAD_BYTES)
        text += piece
        if not piece or not b"HTTP/1.1 200 ".startswith(text[:13]):
            raise SystemExit(f"failed: {text!r}")
    return text.partition(_HEAD_END)[2]


class S3Subject(Subject):
    """A dedicated S3 server on the loopback, rclone's."""

    name = "s3"
    limit = BareSockets.name

    def __init__(self, root: Path | None) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="kvtier-bench-", dir=root)
        self._server = S3Server(Path(self._directory.name), buckets=(_BUCKET,))
        self._rounds = 0

    def __enter__(self) -> S3Subject:
        self._server.start()
        return self

    def __exit__(self, *failure: object) -> None:
        self._server.kill()
        self._directory.cleanup()

    def clear(self) -> None:
        shutil.rmtree(self._server.buckets / _BUCKET / self._place)

    @property
    def _place(self) -> str:
        # The server caches a directory's content, so each round has its own directory.
        return f"round-{self._rounds}"

    def ways(self, work: Work) -> Sequence[Way]:
        self._rounds += 1
        endpoint, place = self._server.endpoint, self._place
        tier_url = self._server.tier_url(f"{_BUCKET}/{place}", connections=work.at_a_time)
        self._server.make_shards(f"{_BUCKET}/{place}/{TierWay.namespace.fingerprint}")
        return [
            TierWay(work, url=tier_url),
            Aiobotocore(work, endpoint, place),
            Obstore(work, endpoint, place),
            BareSockets(work, endpoint, place),
        ]
