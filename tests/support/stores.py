"""Stores that outlive an engine's process, and whose chunks a test can count and damage."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import redis

from support.mooncake_store import MooncakeStore
from support.redis_server import Server
from support.s3_server import S3Server

#: Offset of the payload byte that :meth:`Store.damage` changes: part of a float32's exponent.
DAMAGED_BYTE = 4003
_MEMCACHED = Path(__file__).parents[2] / "examples/kvtier-memcached/tests/memcached_server.py"


class Store(ABC):
    name: str
    runners: Sequence[str] = ("thread", "process")

    def __init__(self, url: str, chunk_bytes: int) -> None:
        self.url = url
        self.chunk_bytes = chunk_bytes

    @abstractmethod
    def chunks(self) -> int: ...

    @abstractmethod
    def damage(self) -> None:
        """Flip one bit of each chunk's payload."""

    @abstractmethod
    def kill(self) -> None:
        """Remove the folder or kill the server, while a tier uses the store."""


class ServedStore(Store):
    def __init__(self, server: Server | S3Server | MooncakeStore, chunk_bytes: int) -> None:
        super().__init__(server.url, chunk_bytes)
        self._process = server
        self.start()

    def kill(self) -> None:
        self._process.kill()

    def start(self) -> None:
        self._process.start()


class Folder(Store):
    name = "file"

    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        super().__init__(f"file://{folder}?direct_io=off", chunk_bytes)
        self._folder = folder

    def chunks(self) -> int:
        return len(self._files())

    def damage(self) -> None:
        _damage(self._files(), self.chunk_bytes)

    def plant(self, fingerprint: str, manifest: bytes) -> None:
        """Write a namespace's manifest, as anyone who can write to the store could."""
        directory = self._folder / fingerprint
        directory.mkdir(exist_ok=True)
        (directory / "manifest.json").write_bytes(manifest)

    def kill(self) -> None:
        # Repeat the removal, because a tier may be writing files in the folder.
        while self._folder.is_dir():
            shutil.rmtree(self._folder, ignore_errors=True)
            # Put a file in the folder's place, because the tier would recreate a missing root.
            with suppress(FileExistsError):
                self._folder.touch(exist_ok=False)

    def _files(self) -> list[Path]:
        return _files(self._folder, "*.kv", self.chunk_bytes)


class RedisStore(ServedStore):
    """A redis-server, which loses its chunks when it is killed."""

    name = "redis"

    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        self._server = Server(folder)
        super().__init__(self._server, chunk_bytes)

    def chunks(self) -> int:
        return len(self._names())

    def damage(self) -> None:
        with self._server.client() as client:
            for name in self._names():
                at = client.strlen(name) - self.chunk_bytes + DAMAGED_BYTE
                (byte,) = client.getrange(name, at, at)
                client.setrange(name, at, bytes([byte ^ 1]))

    def client(self) -> redis.Redis:
        return self._server.client()

    def _names(self) -> list[bytes]:
        with self._server.client() as client:
            return [name for name in client.scan_iter() if client.strlen(name) > self.chunk_bytes]


class S3Store(ServedStore):
    """An S3 server, which keeps its chunks when it is killed."""

    name = "s3"

    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        self._server = S3Server(folder)
        super().__init__(self._server, chunk_bytes)

    def chunks(self) -> int:
        return len(self._objects())

    def damage(self) -> None:
        _damage(self._objects(), self.chunk_bytes)

    def _objects(self) -> list[Path]:
        return _files(self._server.buckets, "*", self.chunk_bytes)


class Mooncake(ServedStore):
    """A Mooncake Store of one node, which loses its chunks when it is killed."""

    name = "mooncake"
    runners = ("process",)

    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        self._store = MooncakeStore(folder)
        super().__init__(self._store, chunk_bytes)

    def chunks(self) -> int:
        return len(self._store.names())

    def damage(self) -> None:
        (node,) = self._store.nodes
        for name in self._store.names():
            content = bytearray(node.ask("get", name))
            content[len(content) - self.chunk_bytes + DAMAGED_BYTE] ^= 1
            node.ask("remove", name, True)
            node.ask("put", name, bytes(content))


class MemcachedStore(ServedStore):
    """A memcached, which loses its chunks when it is killed."""

    name = "memcached"
    # Use only a process, because third-party backends run in a process by default.
    runners = ("process",)

    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        self._server = _make_memcached()
        super().__init__(self._server, chunk_bytes)

    def chunks(self) -> int:
        return len(self._chunks())

    def damage(self) -> None:
        for pieces in self._chunks().values():
            values = [self._server.ask(b"mg %b v" % name.encode())[1] for name in pieces]
            # Damage the first piece, which contains the header and the start of the payload.
            damaged = bytearray(values[0])
            damaged[sum(map(len, values)) - self.chunk_bytes + DAMAGED_BYTE] ^= 1
            name = pieces[0].encode()
            line, _ = self._server.ask(b"ms %b %d" % (name, len(damaged)), bytes(damaged))
            assert line.startswith(b"HD")

    def _chunks(self) -> dict[str, list[str]]:
        chunks: dict[str, list[str]] = {}
        for name in sorted(self._server.names()):
            stem, _, number = name.rpartition(".")
            if number.isdecimal():
                chunks.setdefault(stem, []).append(name)
        return chunks


def _make_memcached() -> Any:
    spec = importlib.util.spec_from_file_location("memcached_server", _MEMCACHED)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MemcachedServer()


def _files(folder: Path, pattern: str, chunk_bytes: int) -> list[Path]:
    """Return the files large enough for a chunk; skip files that vanish during the search."""
    found = []
    for path in folder.rglob(pattern):
        with suppress(FileNotFoundError):
            if path.is_file() and path.stat().st_size > chunk_bytes:
                found.append(path)
    return found


def _damage(files: Sequence[Path], chunk_bytes: int) -> None:
    for path in files:
        status = path.stat()
        with path.open("r+b") as file:
            file.seek(status.st_size - chunk_bytes + DAMAGED_BYTE)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        # Restore the times, because damage on a disk does not change them.
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


#: The stores for the tests of the LMCache and SGLang adapters.
STORES: dict[str, type[Store]] = {
    kind.name: kind for kind in (Folder, RedisStore, S3Store, MemcachedStore)
}


def store_fixture(chunk_bytes: int) -> Any:
    @pytest.fixture(params=STORES, name="store")
    def each_store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
        made = STORES[request.param](tmp_path / "store", chunk_bytes)  # type: ignore[call-arg]
        yield made
        if isinstance(made, ServedStore):
            made.kill()

    return each_store


@contextmanager
def another_process() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        yield process
