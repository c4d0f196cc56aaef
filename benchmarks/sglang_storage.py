"""MiB/s of SGLang's own storage for files, and of ours, in one run.

Usage, in SGLang's environment: python benchmarks/sglang_storage.py [--pages N] [--rounds N]

Each storage is attached to a cache controller of SGLang's, and gets one batch of pages by the
functions that its storage threads call, from and to its host pool. Each round measures every
storage in turn; medians are printed, and the ratio to ours in place within a round. The page cache
is warm. Ours checks every byte; SGLang's own does not.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

from support.sglang_host import PAGE_TOKENS, Host, Kind

#: Of these pages keys and values are 1 MiB each.
_LAYERS = 128
_KINDS = {
    "kvtier, in place": (Kind(layout="page_first_direct", layers=_LAYERS), {}),
    "kvtier, in a process": (
        Kind(layout="page_first_direct", layers=_LAYERS),
        {"runner": "process"},
    ),
    "kvtier, layers first": (Kind(layout="layer_first", layers=_LAYERS), {}),
    "SGLang file": (Kind(layout="page_first_direct", layers=_LAYERS), None),
    "SGLang file, layers first": (Kind(layout="layer_first", layers=_LAYERS), None),
}


def hosts(folder: Path) -> dict[str, Host]:
    """Make a host for each storage."""
    made = {}
    for name, (kind, entry) in _KINDS.items():
        place = folder / name.replace(" ", "-").replace(",", "")
        if entry is None:
            os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = str(place)
            made[name] = Host(kind, backend="file")
        else:
            made[name] = Host(kind, url=f"file://{place}?direct_io=off", **entry)
    return made


def play(host: Host, hashes: list[str]) -> tuple[float, float]:
    """Store pages and load them again; return the seconds of both."""
    controller = host.controller
    indices = host.pool.alloc(len(hashes) * PAGE_TOKENS)
    host.pool.kv_buffer.view(-1)[::PAGE_TOKENS].fill_(1.0)
    kept = host.pool.get_data_page(int(indices[-PAGE_TOKENS])).clone()
    begin_s = time.perf_counter()
    assert controller.page_set_func(hashes, indices)
    store_s = time.perf_counter() - begin_s
    host.pool.kv_buffer.zero_()
    operation: Any = SimpleNamespace(request_id="bench", is_terminated=lambda: False)
    begin_s = time.perf_counter()
    assert host.storage.batch_exists(hashes) == len(hashes)
    assert controller.page_get_func(operation, hashes, indices) == len(hashes)
    load_s = time.perf_counter() - begin_s
    assert host.pool.get_data_page(int(indices[-PAGE_TOKENS])).equal(kept)
    host.pool.free(indices)
    return store_s, load_s


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pages", type=int, default=24, help="of 2 MiB, in a batch (24)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds beside a first one (9)")
    arguments = parser.parse_args()
    rounds: dict[str, list[tuple[float, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        made = hosts(Path(name))
        for number in range(arguments.rounds + 1):
            for what, host in made.items():
                pages = range(number * arguments.pages, (number + 1) * arguments.pages)
                seconds = play(host, host.hashes(pages))
                if number:
                    rounds.setdefault(what, []).append(seconds)
        for host in made.values():
            host.detach()
    mib = 2 * arguments.pages
    print(f"{arguments.pages} pages of 2 MiB, MiB/s (ratio to kvtier's in place, same round)")
    ours = next(iter(rounds.values()))
    for what, measured in rounds.items():
        cells = []
        for at, operation_name in enumerate(("store", "load")):
            rate = statistics.median(mib / of[at] for of in measured)
            ratio = statistics.median(
                own[at] / of[at] for own, of in zip(ours, measured, strict=True)
            )
            cells.append(f"{operation_name} {rate:6,.0f} ({ratio:.2f})")
        print(f"{what:26} {'   '.join(cells)}")


if __name__ == "__main__":
    main()
