"""Where tiers keep chunks outside of any engine's process, and how to get at them from there."""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

from support.redis_server import Server
from support.s3_server import S3Server

#: Which bit :meth:`Store.damage` flips: this byte's lowest. Of a float32 it changes the exponent.
DAMAGED_BYTE = 4003


class Store(ABC):
    """Outlives engines. Each kind has a name, which is the backend's, and a tier's URL.

    Args:
        url: of a tier in it.
        chunk_bytes: payload of a chunk.
    """

    name: str

    def __init__(self, url: str, chunk_bytes: int) -> None:
        self.url = url
        self.chunk_bytes = chunk_bytes

    @abstractmethod
    def chunks(self) -> int:
        """How many chunks it holds."""

    @abstractmethod
    def damage(self) -> None:
        """Flip one bit of each chunk's payload."""

    @abstractmethod
    def kill(self) -> None:
        """Take it away from under the hands of whoever uses it."""


class ServedStore(Store):
    """One that a server keeps, which can come back.

    Args:
        server: it; started here.
        chunk_bytes: payload of a chunk.
    """

    def __init__(self, server: Server | S3Server, chunk_bytes: int) -> None:
        super().__init__(server.url, chunk_bytes)
        self._process = server
        self.start()

    def kill(self) -> None:
        self._process.kill()

    def start(self) -> None:
        """Bring it back, with what survived."""
        self._process.start()


class Folder(Store):
    """The file tier's.

    Args:
        folder: of its own; need not be there yet.
        chunk_bytes: payload of a chunk.
    """

    name = "file"

    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        super().__init__(f"file://{folder}?direct_io=off", chunk_bytes)
        self._folder = folder

    def chunks(self) -> int:
        return len(self._files())

    def damage(self) -> None:
        _damage(self._files(), self.chunk_bytes)

    def kill(self) -> None:
        if self._folder.is_dir():
            shutil.rmtree(self._folder)
            # Where nothing is, the tier makes its root again.
            self._folder.touch()

    def _files(self) -> list[Path]:
        return _files(self._folder, "*.kv", self.chunk_bytes)


class RedisStore(ServedStore):
    """A redis-server of its own, which forgets everything when it is killed.

    Args:
        folder: of its own.
        chunk_bytes: payload of a chunk.
    """

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

    def _names(self) -> list[bytes]:
        with self._server.client() as client:
            return [name for name in client.scan_iter() if client.strlen(name) > self.chunk_bytes]


class S3Store(ServedStore):
    """An S3 server of its own, which keeps everything when it is killed.

    Args:
        folder: of its own.
        chunk_bytes: payload of a chunk.
    """

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


def _files(folder: Path, pattern: str, chunk_bytes: int) -> list[Path]:
    """Those that are large enough to be a chunk."""
    files = (path for path in folder.rglob(pattern) if path.is_file())
    return [path for path in files if path.stat().st_size > chunk_bytes]


def _damage(files: Sequence[Path], chunk_bytes: int) -> None:
    for path in files:
        status = path.stat()
        with path.open("r+b") as file:
            file.seek(status.st_size - chunk_bytes + DAMAGED_BYTE)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 1]))
        # As a disk would damage it, unseen.
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
