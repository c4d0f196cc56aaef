"""The store of the example for memcached."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from support.stores import DAMAGED_BYTE, ServedStore

_SERVER = Path(__file__).parents[2] / "examples/kvtier-memcached/tests/memcached_server.py"


def make_server(*options: str) -> Any:
    spec = importlib.util.spec_from_file_location("memcached_server", _SERVER)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MemcachedServer(*options)


class MemcachedStore(ServedStore):
    """A dedicated memcached, which forgets everything when it is killed."""

    name = "memcached"
    # The default runner of an author's own backend.
    runners = ("process",)

    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        self._server = make_server()
        super().__init__(self._server, chunk_bytes)

    def chunks(self) -> int:
        return len(self._chunks())

    def damage(self) -> None:
        for pieces in self._chunks().values():
            values = [self._server.ask(b"mg %b v" % name.encode())[1] for name in pieces]
            # The header is in the first piece, with the payload's start behind it.
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
