"""The obstore tier, which keeps each chunk as an object in a bucket."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import ObjectStore

from kvtier_obstore.config import ObstoreTierConfig
from kvtier_obstore.faults import SettingError, error_of, first_line
from kvtier_sdk import (
    Capability,
    ChunkNotFoundError,
    ChunkTierManager,
    ConfigError,
    CorruptChunkError,
    Entry,
    Locality,
    Medium,
    OffloadKey,
    StoredNamespace,
    TierContext,
    TierError,
    Transfer,
)

_SUFFIX = ".kv"
_MANIFEST = "manifest.json"
_MOST_MANIFEST_BYTES = 1 << 20


class ObstoreTier(ChunkTierManager):
    """A tier that keeps chunks in a bucket, under the same names as :class:`kvtier_s3.S3Tier`.

    A single request writes an object, so an existing object is always whole. A request of obstore
    continues for a while after its cancellation. So a cancelled store or deletion waits until its
    request ends, at most ``timeout``.
    """

    config_model = ObstoreTierConfig
    medium = Medium.STORAGE
    locality = Locality.REMOTE
    capabilities = Capability.DELETE | Capability.SCAN | Capability.NAMESPACES
    contract_version: ClassVar[int] = 1
    config: ObstoreTierConfig

    def __init__(self, config: ObstoreTierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self.fan_out = config.connections
        self._root = f"{config.prefix}/".removeprefix("/")
        self._start = f"{self._root}{context.namespace.fingerprint}/"
        self._made: tuple[dict[str, str], ObjectStore] | None = None

    async def open(self) -> None:
        try:
            await self._call(obstore.list_with_delimiter_async, self._start)
            if not self.context.maintenance:
                manifest = self.context.namespace.manifest_json().encode()
                await self._call(self._put, self._start + _MANIFEST, [memoryview(manifest)])
        except SettingError as error:
            raise ConfigError(str(error)) from None

    async def close(self) -> None:
        self._made = None  # dropping the last reference closes the store's connections

    async def contains_chunk(self, key: OffloadKey) -> bool:
        with suppress(ChunkNotFoundError):
            await self._call(obstore.head_async, self._name(key))
            return True
        return False

    async def store_chunk(self, transfer: Transfer) -> None:
        put = partial(self._put, replace=transfer.replace or not self.config.conditional_put)
        await self._to_its_end(self._call(put, self._name(transfer.key), transfer.buffers))

    async def load_chunk(self, transfer: Transfer) -> None:
        stored = await self._call(self._get, self._name(transfer.key), self.context.object_bytes)
        split = len(transfer.header)
        transfer.header[:], transfer.payload[:] = stored[:split], stored[split:]

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        async def delete(key: OffloadKey) -> None:
            with suppress(ChunkNotFoundError):
                await self._to_its_end(self._call(obstore.delete_async, self._name(key)))

        calls = [partial(delete, key) for key in keys]
        await self.context.clock.gather_bounded(calls, limit=self.fan_out)
        self.context.report_removed(keys)

    async def scan(self) -> AsyncIterator[Entry]:
        with _translating():
            async for page in obstore.list(self._store(), prefix=self._start):
                for found in page:
                    key = self._key_in(found["path"])
                    if key is not None:
                        yield Entry(key, found["size"], found["last_modified"].timestamp())

    async def namespaces(self) -> AsyncIterator[StoredNamespace]:
        listing = await self._call(obstore.list_with_delimiter_async, self._root)
        for directory in listing["common_prefixes"]:
            fingerprint = directory.rpartition("/")[2]
            if StoredNamespace.is_fingerprint(fingerprint):
                manifest = None
                with suppress(ChunkNotFoundError, CorruptChunkError):
                    manifest = await self._call(self._get, f"{directory}/{_MANIFEST}", None)
                yield StoredNamespace.read(fingerprint, bytes(manifest) if manifest else None)

    def _store(self) -> ObjectStore:
        """Return obstore's store. Make a new store if a secret has changed."""
        settings = self.config.store_settings()
        if self._made is None or self._made[0] != settings:
            try:
                self._made = settings, self.config.make_store(settings)
            except Exception as error:
                raise SettingError(first_line(error)) from None
        return self._made[1]

    async def _call(self, call: Callable[..., Awaitable[Any]], *arguments: object) -> Any:
        with _translating():
            return await call(self._store(), *arguments)

    async def _to_its_end(self, call: Coroutine[object, object, None]) -> None:
        """Wait until the call ends, even if this task is cancelled."""
        task = self.context.clock.spawn(call, name="obstore")
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([task])
            task.exception()  # asyncio would log an exception that is never retrieved
            raise

    @staticmethod
    async def _put(
        store: ObjectStore, name: str, content: Sequence[memoryview], *, replace: bool = True
    ) -> None:
        with suppress(AlreadyExistsError):
            how: Any = {"mode": "overwrite" if replace else "create", "use_multipart": False}
            await obstore.put_async(store, name, content, **how)

    @staticmethod
    async def _get(store: ObjectStore, name: str, size_bytes: int | None) -> memoryview:
        """Return an object's bytes. Refuse an object of the wrong length before the transfer."""
        found = await obstore.get_async(store, name)
        stored_bytes = found.meta["size"]
        if stored_bytes != size_bytes and (size_bytes or stored_bytes > _MOST_MANIFEST_BYTES):
            raise CorruptChunkError(f"{stored_bytes} bytes stored; expected {size_bytes}")
        return memoryview(await found.bytes_async())

    def _name(self, key: OffloadKey) -> str:
        shard = hashlib.blake2b(key, digest_size=1).hexdigest()
        return f"{self._start}{shard}/{key.hex()}{_SUFFIX}"

    def _key_in(self, name: str) -> OffloadKey | None:
        try:
            key = bytes.fromhex(name.rpartition("/")[2].removesuffix(_SUFFIX))
        except ValueError:
            return None
        return key if self._name(key) == name else None


@contextmanager
def _translating() -> Iterator[None]:
    try:
        yield
    except TierError:
        raise
    except BaseException as error:
        # obstore reports a panic as a BaseException whose class cannot be imported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise error_of(error) from None
        raise
