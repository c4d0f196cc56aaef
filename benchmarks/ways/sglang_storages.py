"""SGLang's file storage and kvtier's storage, each attached to SGLang's cache controller."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from support.sglang_host import PAGE_TOKENS, Host, Kind

# isort: split
import torch

from ways.storage import Storage

#: With this number of layers, a page has 1 MiB of keys and 1 MiB of values.
_LAYERS = 128
_PAGE_BYTES = 2 << 20
#: The host pool's layout and the tier's options; ``None`` for SGLang's own storage.
_WAYS: dict[str, tuple[str, dict[str, str] | None]] = {
    "kvtier": ("page_first_direct", {}),
    "kvtier, process": ("page_first_direct", {"runner": "process"}),
    "kvtier, layer_first": ("layer_first", {}),
    "file": ("page_first_direct", None),
    "file, layer_first": ("layer_first", None),
}


def storages(folder: Path, batch_bytes: int, stack: ExitStack) -> dict[str, dict[str, Storage]]:
    made: dict[str, Storage] = {}
    for way, (layout, entry) in _WAYS.items():
        kind, place = Kind(layout=layout, layers=_LAYERS), folder / "file" / way
        if entry is None:
            os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(place)
            host = Host(kind, backend="file")
        else:
            url = f"file://{place}?direct_io=off".replace(" ", "%20")
            host = Host(kind, url=url, **entry)
        stack.callback(host.detach)
        made[way] = _Attached(host, batch_bytes // _PAGE_BYTES)
    return {"file": made}


class _Attached(Storage):
    """A storage, used through the functions that SGLang's storage threads call."""

    object_bytes = _PAGE_BYTES // 2  # keys and values are two files

    def __init__(self, host: Host, pages: int) -> None:
        self._host = host
        self._pages = pages
        self._indices = host.pool.alloc(pages * PAGE_TOKENS)

    def parts(self) -> list[torch.Tensor]:
        return [self._host.pool.kv_buffer.view(-1)]

    def store(self, number: int) -> None:
        assert self._host.controller.page_set_func(self._hashes(number), self._indices)

    def find(self, number: int) -> None:
        assert self._host.storage.batch_exists(self._hashes(number)) == self._pages

    def load(self, number: int) -> None:
        operation: Any = SimpleNamespace(request_id="bench", is_terminated=lambda: False)
        hashes = self._hashes(number)
        loaded = self._host.controller.page_get_func(operation, hashes, self._indices)
        assert loaded == self._pages

    def holds(self, content: Any) -> bool:
        """Compare only the batch's pages, because the pool has other pages too."""
        (kept,) = content
        pool = self._host.pool
        starts = [int(index) for index in self._indices[::PAGE_TOKENS]]
        here = [pool.get_data_page(start).view(torch.uint8).clone() for start in starts]
        self.parts()[0].view(torch.uint8).copy_(kept)
        return all(
            pool.get_data_page(start).view(torch.uint8).equal(page)
            for start, page in zip(starts, here, strict=True)
        )

    def _hashes(self, number: int) -> list[str]:
        return self._host.hashes(range(number * self._pages, (number + 1) * self._pages))
