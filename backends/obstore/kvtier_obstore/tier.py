"""The obstore tier, which keeps each chunk as an object in a bucket."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
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
    ObjectNames,
    OffloadKey,
    StoredNamespace,
    TierContext,
    TierError,
    Transfer,
    wait_out,
)


class ObstoreTier(ChunkTierManager):
    """A tier that keeps chunks in a bucket, under the same names as :class:`kvtier_s3.S3Tier`.

    A single request writes an object, so an existing object is always whole. After a cancellation,
    obstore continues the request for a while. So a cancelled store or deletion waits for the
    end of its request, for up to ``timeout``.
    """

    config_model = ObstoreTierConfig
    locality = Locality.REMOTE
    capabilities = Capability.DELETE | Capability.SCAN | Capability.NAMESPACES
    contract_version: ClassVar[int] = 1
    config: ObstoreTierConfig

    def __init__(self, config: ObstoreTierConfig, context: TierContext) -> None:
        super().__init__(config, context)
        self.fan_out = config.connections
        self._names = ObjectNames(config.prefix, context.namespace)
        self._made: tuple[dict[str, str], ObjectStore] | None = None

    async def open(self) -> None:
        try:
            await self._call(obstore.list_with_delimiter_async, self._names.start)
            if not self.context.maintenance:
                manifest = self.context.namespace.manifest_json().encode()
                await self._call(self._put, self._names.manifest, [memoryview(manifest)])
        except SettingError as error:
            raise ConfigError(str(error)) from None

    async def close(self) -> None:
        self._made = None  # dropping the last reference closes the store's connections

    async def contains_chunk(self, key: OffloadKey) -> bool:
        with suppress(ChunkNotFoundError):
            await self._call(obstore.head_async, self._names.of(key))
            return True
        return False

    async def store_chunk(self, transfer: Transfer) -> None:
        put = partial(self._put, replace=transfer.replace or not self.config.conditional_put)
        await self._to_its_end(put, self._names.of(transfer.key), transfer.buffers)

    async def load_chunk(self, transfer: Transfer) -> None:
        name = self._names.of(transfer.key)
        transfer.fill(await self._call(self._get, name, transfer.object_bytes))

    async def delete_chunk(self, key: OffloadKey) -> None:
        with suppress(ChunkNotFoundError):
            await self._to_its_end(obstore.delete_async, self._names.of(key))
        self.context.report_removed([key])

    async def scan(self) -> AsyncIterator[Entry]:
        pages = obstore.list(self._store(), prefix=self._names.start)
        while (page := await self._call(lambda _: anext(pages, None))) is not None:
            for found in page:
                if (key := self._names.key_in(found["path"])) is not None:
                    yield Entry(key, found["size"], found["last_modified"].timestamp())

    async def namespaces(self) -> AsyncIterator[StoredNamespace]:
        listing = await self._call(obstore.list_with_delimiter_async, self._names.root)
        for directory in listing["common_prefixes"]:
            fingerprint = directory.rpartition("/")[2]
            if StoredNamespace.is_fingerprint(fingerprint):
                manifest = None
                with suppress(ChunkNotFoundError, CorruptChunkError):
                    name = self._names.manifest_of(fingerprint)
                    manifest = await self._call(self._get, name, StoredNamespace.MOST_BYTES)
                yield StoredNamespace.read(fingerprint, bytes(manifest) if manifest else None)

    def _store(self) -> ObjectStore:
        """Return obstore's store, or a new store if a secret has changed."""
        settings = self.config.store_settings()
        if self._made is None or self._made[0] != settings:
            try:
                self._made = settings, self.config.make_store(settings)
            except Exception as error:
                raise SettingError(first_line(error)) from None
        return self._made[1]

    async def _call(self, call: Callable[..., Awaitable[Any]], *arguments: object) -> Any:
        try:
            return await call(self._store(), *arguments)
        except TierError:
            raise
        except BaseException as error:
            # obstore reports a panic as a BaseException whose class cannot be imported.
            if isinstance(error, Exception) or type(error).__name__ == "PanicException":
                raise error_of(error) from None
            raise

    async def _to_its_end(self, call: Callable[..., Awaitable[Any]], *arguments: object) -> None:
        task = self.context.clock.spawn(self._call(call, *arguments), name="obstore")
        await wait_out([task])
        await task

    @staticmethod
    async def _put(
        store: ObjectStore, name: str, content: Sequence[memoryview], *, replace: bool = True
    ) -> None:
        with suppress(AlreadyExistsError):
            how: Any = {"mode": "overwrite" if replace else "create", "use_multipart": False}
            await obstore.put_async(store, name, content, **how)

    @staticmethod
    async def _get(store: ObjectStore, name: str, most_bytes: int) -> memoryview:
        found = await obstore.get_async(store, name)
        if found.meta["size"] > most_bytes:
            raise CorruptChunkError(f"{found.meta['size']} bytes stored; at most {most_bytes} fit")
        return memoryview(await found.bytes_async())
