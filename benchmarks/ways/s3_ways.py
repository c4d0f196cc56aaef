"""The programs for S3: two tiers, plain obstore, and bare sockets."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import botocore.session
import obstore
from botocore.config import Config
from obstore.store import S3Store
from support.papers import make_papers
from support.s3_server import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY, S3Server

from ways.tier_way import TierWay
from ways.way import ClientWay, Subject, Way, Work

_BUCKET = "kv"
_HEAD_END = b"\r\n\r\n"
_HEAD_BYTES = 4096


class Obstore(ClientWay):
    def __init__(self, work: Work, endpoint: str, place: str, client: Mapping[str, Any]) -> None:
        super().__init__(work)
        self._place = place
        self._store = S3Store(
            _BUCKET,
            endpoint=endpoint,
            access_key_id=ACCESS_KEY_ID,
            secret_access_key=SECRET_ACCESS_KEY,
            region=REGION,
            # Like the tier, do not sign payloads: a digest costs more than the rest of a request.
            unsigned_payload=True,
            client_options={"allow_http": True, **client},
        )

    async def put(self, number: int, value: bytes) -> None:
        await obstore.put_async(self._store, f"{self._place}/obstore/{number:020}", value)

    async def get(self, number: int) -> memoryview:
        answer = await obstore.get_async(self._store, f"{self._place}/obstore/{number:020}")
        return memoryview(await answer.bytes_async())


class BareSockets(Way):
    """The limit: presigned requests over blocking sockets, in ``at_a_time`` threads."""

    def __init__(self, work: Work, endpoint: str, place: str) -> None:
        super().__init__(work)
        self._endpoint = endpoint
        self._address = urlsplit(endpoint).hostname, urlsplit(endpoint).port
        self._place = place

    async def open(self) -> None:
        client = botocore.session.get_session().create_client(
            "s3",
            config=Config(signature_version="s3v4"),
            aws_access_key_id=ACCESS_KEY_ID,
            aws_secret_access_key=SECRET_ACCESS_KEY,
            region_name=REGION,
            endpoint_url=self._endpoint,
        )
        self._puts, self._gets = (
            [self._head(client, operation, number) for number in range(self.work.keys)]
            for operation in ("put_object", "get_object")
        )
        # Create the directory first: if two requests create it at the same time, one of them
        # fails. obstore would retry, but bare sockets do not.
        client.put_object(Bucket=_BUCKET, Key=f"{self._place}/bare/first")
        client.close()

    def _head(self, client: Any, operation: str, number: int) -> bytes:
        what = {"Bucket": _BUCKET, "Key": f"{self._place}/bare/{number:020}"}
        url = urlsplit(client.generate_presigned_url(operation, Params=what))
        length_bytes = self.work.object_bytes if operation == "put_object" else 0
        return (
            f"{operation[:3].upper()} {url.path}?{url.query} HTTP/1.1\r\nHost: {url.netloc}\r\n"
            f"Content-Length: {length_bytes}\r\n\r\n"
        ).encode()

    async def store(self) -> None:
        def lane(rest: Iterator[int]) -> None:
            with socket.create_connection(self._address) as sock:
                for number in rest:
                    _send_all(sock, [self._puts[number], *self.work.slots[number]])
                    _answer(sock)

        self.work.in_threads(lane, range(self.work.keys))

    async def load(self) -> None:
        def lane(rest: Iterator[int]) -> None:
            with socket.create_connection(self._address) as sock:
                for number in rest:
                    _send_all(sock, [self._gets[number]])
                    # The head's last read may also have received the start of the object.
                    came, left = _answer(sock), []
                    for view in self.work.slots[number]:
                        view[: len(came)] = came[: len(view)]
                        left.append(view[len(came) :])
                        came = came[len(view) :]
                    _fill(sock, left)

        self.work.in_threads(lane, range(self.work.keys))


def _answer(sock: socket.socket) -> bytes:
    """Read the head of a response, and return the bytes received after it."""
    text = b""
    while _HEAD_END not in text:
        piece = sock.recv(_HEAD_BYTES)
        text += piece
        if not piece or not b"HTTP/1.1 200 ".startswith(text[:13]):
            raise SystemExit(f"failed: {text!r}")
    return text.partition(_HEAD_END)[2]


def _send_all(sock: socket.socket, views: Sequence[bytes | memoryview]) -> None:
    """Send the buffers in order, in one system call if possible."""
    sent_bytes = sock.sendmsg(views)
    for view in views:
        if sent_bytes < len(view):
            sock.sendall(view[sent_bytes:])
        sent_bytes = max(0, sent_bytes - len(view))


def _fill(sock: socket.socket, views: Sequence[memoryview]) -> None:
    """Receive into the buffers in order, in one system call if possible."""
    received_bytes, *_ = sock.recvmsg_into(views, 0, socket.MSG_WAITALL)
    for view in views:
        rest = view[received_bytes:]
        received_bytes = max(0, received_bytes - len(view))
        while rest:
            count_bytes = sock.recv_into(rest, 0, socket.MSG_WAITALL)
            if not count_bytes:
                raise SystemExit("failed: the server closed the connection")
            rest = rest[count_bytes:]


class S3Subject(Subject):
    """rclone's S3 server on the loopback, with https if ``tls`` is true."""

    def __init__(self, root: Path, *, tls: bool = False) -> None:
        super().__init__(root)
        self._ca: str | None = None
        options: list[str] = []
        if tls:
            papers = make_papers(self.directory)
            self._ca, (cert, key) = papers.ca, papers.server
            options = ["--cert", cert, "--key", key]
        scheme = "https" if tls else "http"
        self._server = S3Server(self.directory, *options, scheme=scheme).start()
        self.opened.callback(self._server.kill)
        self.url = self._server.url

    def clear(self) -> None:
        for place in (self._server.buckets / _BUCKET).iterdir():
            shutil.rmtree(place)

    def ways(self, work: Work) -> Mapping[str, Callable[[int], Way]]:
        endpoint = self._server.endpoint

        def place(number: int) -> str:
            # Use a new directory in each round, because the server caches a directory's content.
            return f"round-{work.chunk_bytes}-{number}"

        def tier(number: int, **more: object) -> Way:
            where = f"{_BUCKET}/{place(number)}"
            self._server.make_shards(f"{where}/{TierWay.namespace.fingerprint}")
            ca = {} if self._ca is None else {"tls_ca": self._ca}
            url = self._server.tier_url(where, connections=work.at_a_time, **ca, **more)
            return TierWay(work, url=url.replace("s3:", "obstore:", 1) if more else url)

        client = {} if self._ca is None else {"root_certificate": Path(self._ca).read_bytes()}
        ways: dict[str, Callable[[int], Way]] = {
            "kvtier": tier,
            "kvtier-obstore": partial(tier, service="s3"),
            "obstore": lambda number: Obstore(work, endpoint, place(number), client),
        }
        if self._ca is None:
            ways["bare sockets"] = lambda number: BareSockets(work, endpoint, place(number))
        return ways
