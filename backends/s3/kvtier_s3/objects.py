"""Reads and writes a bucket's objects over the tier's own connections."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from urllib.parse import quote

from kvtier_s3.bucket import Bucket
from kvtier_s3.config import S3TierConfig
from kvtier_s3.connector import connect, tls_context
from kvtier_s3.faults import NO_OBJECT, refusal_of
from kvtier_s3.http import Response, request, request_head
from kvtier_s3.signing import EMPTY, UNSIGNED, Signer
from kvtier_sdk import ChunkNotFoundError, Clock, ConnectionPool, TierError, run_blocking

Buffers = Sequence[bytes | memoryview]


class Objects:
    """A client for a bucket's objects, which reads or writes an object in one request."""

    def __init__(
        self, bucket: Bucket, config: S3TierConfig, clock: Clock, logger: logging.Logger
    ) -> None:
        place = bucket.place
        tls = tls_context(config, bucket.ca_file) if place.scheme == "https" else None
        self._bucket = bucket
        self._clock = clock
        self._logger = logger
        self._path = place.path
        self._signer = Signer(place.authority, place.region)
        reach = partial(connect, (place.host, place.port), tls, config, clock)
        self._connections = ConnectionPool(reach, config.connections)
        # Lookups have their own connections, so that they do not wait for payloads.
        self._lookups = ConnectionPool(reach, config.lookup_connections)
        self._read_headers = config.read_headers
        self._write_headers = config.write_headers
        self._signs_payload = config.sign_payload
        self._is_conditional = config.conditional_put

    def close(self) -> None:
        self._connections.close()
        self._lookups.close()

    async def check(self, start: str) -> None:
        """Raise an error unless the bucket exists and can be listed."""
        query = f"list-type=2&max-keys=1&prefix={quote(start, safe='')}"
        response = await self._ask("GET", self._path.removesuffix("/") or "/", {}, query=query)
        if response.status != 200:
            raise self._bucket.refused(refusal_of(response))

    async def has(self, name: str) -> bool:
        response = await self._ask("HEAD", self._at(name), self._read_headers)
        if response.status == 404:
            return False
        if response.status != 200:
            raise self._refused(response)
        return True

    async def read(self, name: str, target: Sequence[memoryview]) -> int:
        """Return an object's length. If the object fits, ``target`` receives its bytes."""
        response = await self._ask("GET", self._at(name), self._read_headers, target=target)
        if response.status == 404 and refusal_of(response).code in NO_OBJECT:
            raise ChunkNotFoundError("no such chunk")
        if response.status != 200:
            raise self._refused(response)
        if response.length_bytes is None:
            # Do not raise CorruptChunkError, because the object may be intact.
            raise TierError(
                "the server, or a proxy before it, does not say how long an object is "
                "(its response has no Content-Length)"
            )
        return response.length_bytes

    async def write(self, name: str, buffers: Buffers, *, replace: bool = True) -> None:
        """Write an object. Without ``replace``, keep an existing object if the server can do so."""
        is_conditional = self._is_conditional and not replace
        headers = self._write_headers | ({"if-none-match": "*"} if is_conditional else {})
        hashed = await run_blocking(_sha256, buffers) if self._signs_payload else UNSIGNED
        response = await self._ask("PUT", self._at(name), headers, buffers=buffers, hashed=hashed)
        if is_conditional and response.status == 501:
            self._logger.info("the server knows no conditional put; objects are written over")
            self._is_conditional = False
            await self.write(name, buffers)
        elif response.status != 200 and not (is_conditional and response.status == 412):
            raise self._refused(response)

    def _at(self, name: str) -> str:
        return self._path + quote(name, safe="/-._~")

    async def _ask(
        self,
        method: str,
        path: str,
        headers: Mapping[str, str],
        *,
        query: str = "",
        buffers: Buffers = (),
        hashed: str = EMPTY,
        target: Sequence[memoryview] = (),
    ) -> Response:
        credentials = await self._bucket.credentials()
        pool = self._lookups if method == "HEAD" else self._connections
        async with pool.borrow(for_store=method == "PUT") as connection:
            signed = self._signer.headers(
                method, path, query, headers, hashed, credentials, self._clock.wall_s()
            )
            if method == "PUT":
                signed["content-length"] = str(sum(map(len, buffers)))
            head = request_head(method, f"{path}?{query}" if query else path, signed)
            return await request(connection, [head, *buffers], target, has_body=method != "HEAD")

    def _refused(self, response: Response) -> TierError:
        return self._bucket.refused(refusal_of(response), of_object=True)


def _sha256(buffers: Buffers) -> str:
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.hexdigest()
