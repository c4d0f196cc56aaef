"""The S3 tier. It reads and writes objects; aiobotocore lists, deletes and finds credentials."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import ClassVar

from kvtier_s3.bucket import Bucket
from kvtier_s3.config import S3TierConfig
from kvtier_s3.faults import SettingError
from kvtier_s3.objects import Objects
from kvtier_s3.sweeper import Sweeper
from kvtier_sdk import (
    Capability,
    ChunkError,
    ChunkNotFoundError,
    ChunkTierManager,
    ConfigError,
    Entry,
    Locality,
    ObjectNames,
    OffloadKey,
    RequestContext,
    StoredNamespace,
    TierAuthError,
    TierCapacityError,
    TierContext,
    TierError,
    TierTimeoutError,
    TierUnavailableError,
    Transfer,
    check_any_answered,
)

# A store rewrites a manifest that was written this long ago, in case the bucket was emptied.
_MANIFEST_INTERVAL_S = 60.0


class S3Tier(ChunkTierManager):
    """A tier that stores chunks as objects of an S3 bucket.

    A chunk's header and payload are one object, written in one request, so an existing object is
    always whole.
    """

    config_model = S3TierConfig
    locality = Locality.REMOTE
    capabilities = Capability.DELETE | Capability.SCAN | Capability.NAMESPACES
    contract_version: ClassVar[int] = 1
    config: S3TierConfig

    # open() sets these attributes, on the event loop that uses them.
    _bucket: Bucket
    _objects: Objects

    def __init__(self, config: S3TierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self.fan_out = config.connections
        self._names = ObjectNames(config.prefix, context.namespace)
        self._manifest = context.namespace.manifest_json().encode()
        self._manifest_due_s = 0.0
        self._opened = AsyncExitStack()

    async def open(self) -> None:
        is_engines = not self.context.maintenance
        if is_engines:
            self.config.check_capacity(self.context.object_bytes)
        self._bucket = Bucket(self.config, self.context.clock, self.context.logger)
        self._opened.push_async_callback(self._bucket.close)
        try:
            await self._bucket.open()
            context = self.context
            self._objects = Objects(self._bucket, self.config, context.clock, context.logger)
            self._opened.callback(self._objects.close)
            await self._check()
            if is_engines:
                await self._write_manifest()
        except SettingError as error:
            raise ConfigError(str(error)) from None
        if is_engines:
            sweeper = Sweeper(self.config, context, self._bucket, self._objects, self._names)
            self._opened.push_async_callback(sweeper.close)

    async def close(self) -> None:
        await self._opened.aclose()

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        calls = [partial(self._contains, key) for key in keys]
        limit = self.config.lookup_connections
        found = await self.context.clock.gather_bounded(calls, limit=limit)
        check_any_answered(found)
        return [one is True for one in found]

    async def _contains(self, key: OffloadKey) -> bool | ChunkError:
        try:
            return await self.contains_chunk(key)
        except ChunkError as error:
            return error

    async def contains_chunk(self, key: OffloadKey) -> bool:
        return await self._objects.has(self._names.of(key))

    async def store_chunk(self, transfer: Transfer) -> None:
        name = self._names.of(transfer.key)
        await self._objects.write(name, transfer.buffers, replace=transfer.replace)
        if self.context.clock.now_s() >= self._manifest_due_s:
            self._put_manifest_off()
            with suppress(TierError):
                await self._objects.write(self._names.manifest, [self._manifest], replace=False)

    async def load_chunk(self, transfer: Transfer) -> None:
        name = self._names.of(transfer.key)
        transfer.received(await self._objects.read(name, transfer.buffers))

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        await self._bucket.delete([self._names.of(key) for key in keys])
        self.context.report_removed(keys)

    async def scan(self) -> AsyncIterator[Entry]:
        async for found in self._bucket.listing(self._names.start):
            key = self._names.key_in(found.name)
            if key is not None:
                yield Entry(key, found.size_bytes, found.modified_s)

    async def namespaces(self) -> AsyncIterator[StoredNamespace]:
        async for directory in self._bucket.directories(self._names.root):
            fingerprint = directory.removeprefix(self._names.root).removesuffix("/")
            if StoredNamespace.is_fingerprint(fingerprint):
                yield StoredNamespace.read(fingerprint, await self._manifest_of(fingerprint))

    async def _manifest_of(self, fingerprint: str) -> bytes | None:
        text = bytearray(StoredNamespace.MOST_BYTES)
        with suppress(ChunkNotFoundError):
            name = self._names.manifest_of(fingerprint)
            length_bytes = await self._objects.read(name, [memoryview(text)])
            return bytes(text[:length_bytes])  # all zeros if the object is too long
        return None

    async def _check(self) -> None:
        try:
            await self._objects.check(self._names.start)
        except (TierUnavailableError, TierTimeoutError) as error:
            proxy = self._bucket.unused_proxy
            if proxy is None:
                raise
            text = f"{error}; a proxy is not used for the bucket: {proxy} of the environment"
            raise type(error)(text, retryable=error.retryable) from error

    async def _write_manifest(self) -> None:
        self._put_manifest_off()
        try:
            await self._objects.write(self._names.manifest, [self._manifest])
        except (TierAuthError, TierCapacityError) as error:
            # A failure is harmless, because existing chunks can still be loaded.
            self.context.logger.warning("the manifest was not written: %s", error)

    def _put_manifest_off(self) -> None:
        self._manifest_due_s = self.context.clock.now_s() + _MANIFEST_INTERVAL_S
