"""GB/s of the worker between device blocks and slots, against one contiguous copy of the same size.

Usage: python benchmarks/worker.py [--layers 1,32] [--pages 16,256,4096] [--kib 16,128] [--rounds N]

A page is one block of one tensor, and a slot holds one block of every tensor: a job of 256 pages in
32 layers copies 8,192 runs. "scattered" names random blocks and slots, so that nothing can be
merged; "contiguous" names neighbours on both sides. Every round times all of them one after the
other, so that a noisy machine is noisy for all. The table shows medians over the rounds, and each
round's ratio to its own contiguous copy. On a GPU "run by run" is the scattered job without the
kernel that gathers short runs; every side has a stream of its own.

The peer is torch.Tensor.copy_ of one buffer, on a GPU from or to pinned memory; on a GPU where vLLM
is installed its own copy (swap_blocks_batch) is timed as well. A worker's time is from submit to
the end of wait. "planned" is what a job costs the engine's thread before a device has it. A job's
fixed cost is timed too, on a CPU: "unmoved" is a worker that plans and hands over as usual but
copies nothing, and no worker is faster than that.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import results
import torch
from results import Series

from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.worker import (
    Copy,
    Device,
    GroupLayout,
    HostLayout,
    JobPlan,
    KVGroup,
    KVTensor,
    OffloadWorker,
)
from kvtier_sdk.worker.cpu import CPUDevice
from kvtier_sdk.worker.device import StreamOrEvent

MIB = 1024 * 1024


class Setting:
    """Buffers and block ids for one number of pages of one size in each of some layers."""

    def __init__(
        self,
        device: str,
        pages: int,
        page_bytes: int,
        spread: int,
        threads: int,
        layers: int = 1,
    ) -> None:
        self.device = torch.device(device)
        self.size_bytes = layers * pages * page_bytes
        self.runs = layers * pages
        shape = (pages * spread, page_bytes)
        kv = [torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(layers)]
        host = torch.randint(0, 256, (pages * spread, layers * page_bytes), dtype=torch.uint8)
        self.ours = (kv, host)
        cuda = self.device.type == "cuda"
        self.peer = (
            torch.randint(0, 256, (self.size_bytes,), dtype=torch.uint8, device=device),
            torch.empty(self.size_bytes, dtype=torch.uint8, pin_memory=cuda).random_(),
        )
        chooser = np.random.default_rng(0)
        self.ids = {
            "contiguous": (np.arange(pages), np.arange(pages)),
            "scattered": tuple(chooser.permutation(pages * spread)[:pages] for _ in range(2)),
        }
        mover = CPUDevice(threads=threads) if threads and not cuda else None
        group = KVGroup([KVTensor(layer) for layer in kv])
        self.worker = OffloadWorker([group], host, device=mover)
        self.planner = OffloadWorker([group], host, device=Idle())
        self.unmoved = None if cuda else OffloadWorker([group], host, device=idle_mover(threads))

    def copies(self, operation: str) -> dict[str, Callable[[], None]]:
        """Return the copies that a round times, by name."""
        device_end, host_end = self.peer
        into, out_of = (host_end, device_end) if operation == "store" else (device_end, host_end)
        blocks, slots = self.ids["scattered"]
        found = {"copy_": partial(self._copy_one, into, out_of, self._stream())}
        for name, ids in self.ids.items():
            found[name] = partial(self._work, self.worker, operation, *ids, self._stream())
        found["planned"] = partial(self._work, self.planner, operation, blocks, slots, None)
        if self.unmoved is not None:
            found["unmoved"] = partial(self._work, self.unmoved, operation, blocks, slots, None)
        if self.device.type == "cuda":
            found["run by run"] = partial(self._run_by_run, operation, self._stream())
            vllm = vllm_copy(*self.ours, operation, blocks, slots, self._stream())
            found |= {} if vllm is None else {"vllm": vllm}
        return found

    def close(self) -> None:
        """End the workers."""
        for worker in (self.worker, self.planner, self.unmoved):
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
        with ungathered(self.worker):
            self._work(self.worker, operation, *self.ids["scattered"], stream)

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


class Idle(Device):
    """A device that does nothing with its plans."""

    def register(self, host: HostLayout, groups: Sequence[GroupLayout]) -> None:
        pass

    def start(
        self,
        plan: JobPlan,
        operation: Operation,
        *,
        expedited: bool,
        after: StreamOrEvent | None,
    ) -> Copy:
        return Nothing()

    def close(self) -> None:
        pass


class Nothing(Copy):
    """A copy that has ended."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        pass

    def error(self) -> None:
        return None

    def duration_s(self) -> float:
        return 0.0


def idle_mover(threads: int) -> CPUDevice:
    """A device that does everything but move the bytes."""
    return CPUDevice(threads=threads or None, copy=lambda *_: None)


@contextlib.contextmanager
def used(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Let torch work on this stream, and wait until it has; on a CPU it needs neither."""
    with contextlib.nullcontext() if stream is None else torch.cuda.stream(stream):
        yield
    if stream is not None:
        stream.synchronize()


@contextlib.contextmanager
def ungathered(worker: OffloadWorker) -> Iterator[None]:
    """Let a GPU's worker copy run by run, however short the runs are."""
    device = worker._device
    gatherer, device._gatherer = device._gatherer, None
    try:
        yield
    finally:
        device._gatherer = gatherer


def vllm_copy(
    layers: Sequence[torch.Tensor],
    host: torch.Tensor,
    operation: str,
    blocks: np.ndarray,
    slots: np.ndarray,
    stream: torch.cuda.Stream | None,
) -> Callable[[], None] | None:
    """Return vLLM's batched copy of the same pages, where it is installed."""
    try:
        from vllm import _custom_ops as ops
    except ImportError:
        return None
    page_bytes = layers[0].shape[1]
    rows = host.data_ptr() + slots * host.shape[1]
    on_device = torch.from_numpy(
        np.concatenate([layer.data_ptr() + blocks * page_bytes for layer in layers])
    )
    on_host = torch.from_numpy(
        np.concatenate([rows + index * page_bytes for index in range(len(layers))])
    )
    sizes = torch.full_like(on_device, page_bytes)
    ends = (on_device, on_host) if operation == "store" else (on_host, on_device)

    def copy() -> None:
        with used(stream):
            ops.swap_blocks_batch(*ends, sizes, is_src_access_order_any=operation == "load")

    return copy


def seconds(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def measure(setting: Setting, case: str, operation: str, rounds: int) -> dict[str, Series]:
    """Measure the GB/s of each way by its name."""
    copies = setting.copies(operation)
    for copy in copies.values():
        copy()
    # Small copies are too short for a clock: repeat them for about a millisecond.
    repeats = max(1, 4 * MIB // setting.size_bytes)
    rates: dict[str, list[float]] = {name: [] for name in copies}
    for number in range(rounds):
        for name in results.in_turns(copies, number):
            taken_s = sum(seconds(copies[name]) for _ in range(repeats)) / repeats
            rates[name].append(setting.size_bytes / taken_s / 1e9)
    return {
        name: Series(operation, case, name, "throughput", "GB/s", values)
        for name, values in rates.items()
    }


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Print one row for each number of layers, size, number of pages and direction."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help=f"cpu or cuda (default: {default})")
    parser.add_argument("--layers", type=numbers, default="1,32", help="tensors with these pages")
    parser.add_argument("--pages", type=numbers, default="16,256,4096", help="pages of a tensor")
    parser.add_argument("--kib", type=numbers, default="16,128,2048", help="KiB in a page")
    parser.add_argument("--rounds", type=int, default=9, help="rounds to take medians over")
    parser.add_argument("--max-mib", type=int, default=1024, help="leave out jobs that move more")
    parser.add_argument("--spread", type=int, default=2, help="blocks and slots for each page")
    parser.add_argument("--threads", type=int, default=0, help="copy threads on a CPU (0: default)")
    results.add_option(parser)
    arguments = parser.parse_args()
    measured: list[Series] = []
    print(f"device {arguments.device}, torch {torch.__version__}, ", end="")
    print(f"{torch.get_num_threads()} torch threads, {arguments.rounds} rounds")
    print(
        "GB/s, and in brackets the ratio to copy_ of one contiguous buffer; a job without its bytes"
    )
    for layers in arguments.layers:
        for kib in arguments.kib:
            for pages in arguments.pages:
                if layers * pages * kib * 1024 <= arguments.max_mib * MIB:
                    measured += show(arguments, layers, pages, kib)
    results.write(arguments.json, measured)


def show(arguments: argparse.Namespace, layers: int, pages: int, kib: int) -> list[Series]:
    """Measure and print both directions."""
    setting = Setting(
        arguments.device, pages, kib * 1024, arguments.spread, arguments.threads, layers
    )
    case = f"{pages} x {kib} KiB"
    if layers > 1:
        case = f"{layers} x {case}"
    measured: list[Series] = []
    for operation in ("store", "load"):
        found = measure(setting, case, operation, arguments.rounds)
        measured += found.values()
        without_bytes = {name: found.pop(name) for name in ("planned", "unmoved") if name in found}
        cells = [
            f"{name} {rate.median:5.1f} ({rate.relative_to(found['copy_']).median:.2f})"
            for name, rate in found.items()
        ]
        for name, rate in without_bytes.items():
            cells.append(f"{name} {setting.size_bytes / rate.median / 1e3:5.0f} us")
        print(f"{case:20}  {operation:5}  {'  '.join(cells)}", flush=True)
    setting.close()
    return measured


if __name__ == "__main__":
    main()
