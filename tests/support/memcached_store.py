"""The store of the example for memcached."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from support.stores import DAMAGED_BYTE, ServedStore

_SERVER = Path(__file__).parents[2] / "examples/kvtier-memcached/tests/memcached_server.py"


def make_server() -> Any:
    """Make the server of the example's own tests."""
    spec = importlib.util.spec_from_file_location("memcached_server", _SERVER)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MemcachedServer()


class MemcachedStore(ServedStore):
    """A dedicated memcached, which forgets everything when it is killed.

    Args:
        folder: not used.
        chunk_bytes: payload of a chunk, of one piece.
    """

    name = "memcached"

    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        self._server = make_server()
        super().__init__(self._server, chunk_bytes)

    def chunks(self) -> int:
        return len(self._values())

    def damage(self) -> None:
        for name, value in self._values().items():
            damaged = bytearray(value)
            damaged[len(value) - self.chunk_bytes + DAMAGED_BYTE] ^= 1
            line, _ = self._server.ask(b"ms %b %d" % (name.encode(), len(damaged)), bytes(damaged))
            assert line.startswith(b"HD")

    def _values(self) -> dict[str, bytes]:
        values = {
            name: self._server.ask(b"mg %b v" % name.encode())[1] for name in self._server.names()
        }
        return {name: value for name, value in values.items() if len(value) > self.chunk_bytes}
