"""The obstore tier, which keeps each chunk as an object in a bucket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, ClassVar

import obstore
from obstore.exceptions import AlreadyExistsError
from obstore.store import ObjectStore

import kvtier_sdk as kv
from kvtier_obstore.config import ObstoreTierConfig
from kvtier_obstore.faults import SettingError, error_of, first_line

_MOST_MANIFEST_BYTES = 1 << 20


class ObstoreTier(kv.ChunkTierManager):
    """A tier that keeps chunks in a bucket, under the same names as :class:`kvtier_s3.S3Tier`.

    A single request writes an object, so an existing object is always whole. A request of obstore
    continues for a while after its cancellation. So a cancelled store or deletion waits until its
    request ends, at most ``timeout``.
    """

    config_model = ObstoreTierConfig
    medium = kv.Medium.STORAGE
    locality = kv.Locality.REMOTE
    capabilities = kv.Capability.DELETE | kv.Capability.SCAN | kv.Capability.NAMESPACES
    contract_version: ClassVar[int] = 1
    config: ObstoreTierConfig

    def __init__(self, config: ObstoreTierConfig, context: kv.TierContext) -> None:
        super().__init__(config, context)
        self.fan_out = config.connections
        self._names = kv.ObjectNames(config.prefix, context.namespace)
        self._made: tuple[dict[str, str], ObjectStore] | None = None

    async def open(self) -> None:
        try:
            await self._call(obstore.list_with_delimiter_async, self._names.start)
            if not self.context.maintenance:
                manifest = self.context.namespace.manifest_json().encode()
                await self._call(self._put, self._names.manifest, [memoryview(manifest)])
        except SettingError as error:
            raise kv.ConfigError(str(error)) from None

    async def close(self) -> None:
        self._made = None  # dropping the last reference closes the store's connections

    async def contains_chunk(self, key: kv.OffloadKey) -> bool:
        with suppress(kv.ChunkNotFoundError):
            await self._call(obstore.head_async, self._names.of(key))
            return True
        return False

    async def store_chunk(self, transfer: kv.Transfer) -> None:
        put = partial(self._put, replace=transfer.replace or not self.config.conditional_put)
        await self._call_to_its_end(put, self._names.of(transfer.key), transfer.buffers)

    async def load_chunk(self, transfer: kv.Transfer) -> None:
        stored = await self._call(
            self._get, self._names.of(transfer.key), self.context.object_bytes
        )
        split = len(transfer.header)
        transfer.header[:], transfer.payload[:] = stored[:split], stored[split:]

    async def delete(self, keys: Sequence[kv.OffloadKey]) -> None:
        async def delete(key: kv.OffloadKey) -> None:
            with suppress(kv.ChunkNotFoundError):
                await self._call_to_its_end(obstore.delete_async, self._names.of(key))

        calls = [partial(delete, key) for key in keys]
        await self.context.clock.gather_bounded(calls, limit=self.fan_out)
        self.context.report_removed(keys)

    async def scan(self) -> AsyncIterator[kv.Entry]:
        with _translating():
            async for page in obstore.list(self._store(), prefix=self._names.start):
                for found in page:
                    key = self._names.key_in(found["path"])
                    if key is not None:
                        yield kv.Entry(key, found["size"], found["last_modified"].timestamp())

    async def namespaces(self) -> AsyncIterator[kv.StoredNamespace]:
        listing = await self._call(obstore.list_with_delimiter_async, self._names.root)
        for directory in listing["common_prefixes"]:
            fingerprint = directory.rpartition("/")[2]
            if kv.StoredNamespace.is_fingerprint(fingerprint):
                manifest = None
                with suppress(kv.ChunkNotFoundError, kv.CorruptChunkError):
                    manifest = await self._call(
                        self._get, self._names.manifest_of(fingerprint), None
                    )
                yield kv.StoredNamespace.read(fingerprint, bytes(manifest) if manifest else None)

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

    async def _call_to_its_end(
        self, call: Callable[..., Awaitable[Any]], *arguments: object
    ) -> None:
        task = self.context.clock.spawn(self._call(call, *arguments), name="obstore")
        await kv.wait_out([task])
        await task

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
            raise kv.CorruptChunkError(f"{stored_bytes} bytes stored; expected {size_bytes}")
        return memoryview(await found.bytes_async())


@contextmanager
def _translating() -> Iterator[None]:
    try:
        yield
    except kv.TierError:
        raise
    except BaseException as error:
        # obstore reports a panic as a BaseException whose class cannot be imported.
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise error_of(error) from None
        raise
