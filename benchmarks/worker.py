"""Measure the GB/s of the worker between blocks and slots, and of an equally long contiguous copy.

Usage: python benchmarks/worker.py [--layers 1,32] [--pages 16,256,4096] [--kib 16,128] [--rounds N]

A page is one block of one tensor, and a slot holds one block of every tensor. So a job of 256 pages
in 32 layers copies 8,192 runs of bytes. "scattered" uses random blocks and slots, so that hardly
any runs can be merged. "contiguous" uses adjacent blocks and adjacent slots. "run by run", on a
GPU, is the scattered job without the kernel that gathers short runs. The bytes are random, and are
compared once per kind of copy, before the rounds.

The peer is torch.Tensor.copy_ of one buffer. On a GPU, the host's buffer is in pinned memory, and
each kind of copy has a separate stream. A worker is timed from submit to the end of wait. On a CPU,
"unmoved" is a worker that does everything except the copying: the upper limit for a worker. Its
GB/s count the bytes that a worker would have copied.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch
from runner import Benchmark, Sample, must_be_equal, positive

from kvtier_sdk import HostPool
from kvtier_sdk.worker import KVGroup, KVTensor, OffloadWorker
from kvtier_sdk.worker.cpu import CPUDevice

MIB = 1024 * 1024


class Setting:
    """The buffers and block ids of one measurement."""

    def __init__(
        self, device: str, pages: int, page_bytes: int, spread: int, threads: int, layers: int = 1
    ) -> None:
        self.device = torch.device(device)
        self.size_bytes = layers * pages * page_bytes
        shape = (pages * spread, page_bytes)
        kv = [torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(layers)]
        pool = HostPool(pages * spread, layers * page_bytes)
        host = torch.from_numpy(pool.part(0)).random_()
        self.ours = (kv, host)
        cuda = self.device.type == "cuda"
        self.peer = (
            torch.randint(0, 256, (self.size_bytes,), dtype=torch.uint8, device=device),
            torch.empty(self.size_bytes, dtype=torch.uint8, pin_memory=cuda).random_(),
        )
        chooser = np.random.default_rng(0)
        self.ids = {
            "scattered": tuple(chooser.permutation(pages * spread)[:pages] for _ in range(2)),
            "contiguous": (np.arange(pages), np.arange(pages)),
        }
        mover = CPUDevice(threads=threads) if threads and not cuda else None
        group = KVGroup([KVTensor(layer) for layer in kv])
        self.worker = OffloadWorker([group], host, device=mover)
        # A device that does everything except copying bytes.
        idle = None if cuda else CPUDevice(threads=threads or None, copy=lambda *_: None)
        self.unmoved = None if idle is None else OffloadWorker([group], host, device=idle)

    def copies(self, operation: str) -> dict[str, Callable[[], None]]:
        device_end, host_end = self.peer
        into, out_of = (host_end, device_end) if operation == "store" else (device_end, host_end)
        blocks, slots = self.ids["scattered"]
        found = {
            name: partial(self._work, self.worker, operation, *ids, self._stream())
            for name, ids in self.ids.items()
        }
        found["copy_"] = partial(self._copy_one, into, out_of, self._stream())
        if self.unmoved is not None:
            found["unmoved"] = partial(self._work, self.unmoved, operation, blocks, slots, None)
        if self.device.type == "cuda":
            found["run by run"] = partial(self._run_by_run, operation, self._stream())
        return found

    def check(self, operation: str, name: str, copy: Callable[[], None]) -> None:
        """Copy once, and exit if the bytes are wrong."""
        layers, host = self.ours
        blocks, slots = (torch.from_numpy(ids) for ids in self.ids.get(name, self.ids["scattered"]))
        if name == "unmoved":
            copy()
        elif name == "copy_":
            self.peer[operation == "store"].zero_()
            copy()
            must_be_equal(torch.equal(self.peer[0].cpu(), self.peer[1]))
        else:
            into = [(host, slots)] if operation == "store" else [(one, blocks) for one in layers]
            for rows, ids in into:
                rows[ids.to(rows.device)] = 0
            copy()
            for place, layer in enumerate(layers):
                there = host[slots, place * layer.shape[1] : (place + 1) * layer.shape[1]]
                must_be_equal(torch.equal(layer[blocks.to(layer.device)].cpu(), there))

    def close(self) -> None:
        for worker in (self.worker, self.unmoved):
            if worker is not None:
                worker.shutdown()

    def _stream(self) -> torch.cuda.Stream | None:
        return torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def _copy_one(
        self, into: torch.Tensor, out_of: torch.Tensor, stream: torch.cuda.Stream | None
    ) -> None:
        with used(stream):
            into.copy_(out_of, non_blocking=True)

    def _run_by_run(self, operation: str, stream: torch.cuda.Stream | None) -> None:
        """Copy each run with a separate call, without the kernel that gathers short runs."""
        device = self.worker._device
        gatherer, device._gatherer = device._gatherer, None
        try:
            self._work(self.worker, operation, *self.ids["scattered"], stream)
        finally:
            device._gatherer = gatherer

    def _work(
        self,
        worker: OffloadWorker,
        operation: str,
        blocks: np.ndarray,
        slots: np.ndarray,
        stream: torch.cuda.Stream | None,
    ) -> None:
        submit = worker.submit_store if operation == "store" else worker.submit_load
        submit(1, blocks, slots, after=stream)
        worker.wait([1])
        (result,) = worker.get_finished()
        if not result.success or result.size_bytes != self.size_bytes:
            raise SystemExit(f"the worker failed: {result}")


@contextlib.contextmanager
def used(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Let torch use ``stream``, and wait for the stream at the end; do nothing for ``None``."""
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        yield
    if stream is not None:
        stream.synchronize()


def turn(case: str, size_bytes: int, copy: Callable[[], None], number: int) -> Iterator[Sample]:
    # A small copy is too short to measure, so repeat the copy until 4 MiB are copied.
    repeats = max(1, 4 * MIB // size_bytes)
    began_s = time.perf_counter()
    for _ in range(repeats):
        copy()
    yield case, "throughput", "GB/s", size_bytes * repeats / (time.perf_counter() - began_s) / 1e9


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    bench = Benchmark(__doc__, rounds=9)
    default = "cuda" if torch.cuda.is_available() else "cpu"
    bench.option("--device", default=default, help=f"cpu or cuda (default: {default})")
    bench.option("--layers", type=numbers, default="1,32", help="tensors with these pages")
    bench.option("--pages", type=numbers, default="16,256,4096", help="pages of a tensor")
    bench.option("--kib", type=numbers, default="16,128,2048", help="KiB in a page")
    bench.option("--max-mib", type=positive, default=1024, help="leave out jobs that move more")
    bench.option("--spread", type=positive, default=2, help="blocks and slots for each page")
    bench.option("--threads", type=int, default=0, help="copy threads on a CPU (0: default)")
    options = bench.parse()
    print(f"torch {torch.__version__} on {options.device}, {torch.get_num_threads()} threads")
    for layers, kib, pages in itertools.product(options.layers, options.kib, options.pages):
        if layers * pages * kib * 1024 > options.max_mib * MIB:
            continue
        setting = Setting(
            options.device, pages, kib * 1024, options.spread, options.threads, layers
        )
        case = f"{layers} x " * (layers > 1) + f"{pages} x {kib} KiB"
        for operation in ("store", "load"):
            copies = setting.copies(operation)
            for name, copy in copies.items():
                setting.check(operation, name, copy)
            time_it = partial(turn, case, setting.size_bytes)
            bench.measure(operation, {name: partial(time_it, copies[name]) for name in copies})
        setting.close()
    bench.finish()


if __name__ == "__main__":
    main()
