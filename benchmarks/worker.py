"""GB/s of the worker between device blocks and slots, against one contiguous copy of the same size.

Usage: python benchmarks/worker.py [--pages 16,256,4096] [--kib 16,128,2048] [--rounds N] ...

A page is one block of one tensor, and a slot holds one. "scattered" names random blocks and slots,
so that nothing can be merged; "contiguous" names neighbours on both sides. Every round times all of
them one after the other, so that a noisy machine is noisy for all. The table shows medians over the
rounds, and each round's ratio to its own contiguous copy.

The peer is torch.Tensor.copy_ of one buffer, on a GPU from or to pinned memory; on a GPU where vLLM
is installed its own copy (swap_blocks_batch) is timed as well. A worker's time is from submit to
the end of wait. A job's fixed cost is timed too, on a CPU: "unmoved" is a worker that plans and
hands over as usual but copies nothing, and no worker is faster than that.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import results
import torch
from results import Series

from kvtier_sdk.worker import KVGroup, KVTensor, OffloadWorker
from kvtier_sdk.worker.cpu import CPUDevice

MIB = 1024 * 1024


class Setting:
    """Buffers and block ids for one number of pages of one size."""

    def __init__(self, device: str, pages: int, page_bytes: int, spread: int, threads: int) -> None:
        self.device = torch.device(device)
        self.size_bytes = pages * page_bytes
        cuda = self.device.type == "cuda"
        self.computing = torch.cuda.current_stream(self.device) if cuda else None
        kv = torch.randint(0, 256, (pages * spread, page_bytes), dtype=torch.uint8, device=device)
        host = torch.zeros(pages * spread, page_bytes, dtype=torch.uint8)
        self.ours = (kv, host)
        self.peer = (
            torch.ones(self.size_bytes, dtype=torch.uint8, device=device),
            torch.zeros(self.size_bytes, dtype=torch.uint8, pin_memory=cuda),
        )
        chooser = np.random.default_rng(0)
        self.ids = {
            "contiguous": (np.arange(pages), np.arange(pages)),
            "scattered": tuple(chooser.permutation(pages * spread)[:pages] for _ in range(2)),
        }
        mover = CPUDevice(threads=threads) if threads and not cuda else None
        group = KVGroup([KVTensor(kv)])
        self.worker = OffloadWorker([group], host, device=mover)
        self.unmoved = None if cuda else OffloadWorker([group], host, device=idle_mover(threads))

    def copies(self, operation: str) -> dict[str, Callable[[], None]]:
        """Return the copies that a round times, by name."""
        device_end, host_end = self.peer
        into, out_of = (host_end, device_end) if operation == "store" else (device_end, host_end)
        found = {"copy_": lambda: self._copy_one(into, out_of)}
        for name, (blocks, slots) in self.ids.items():
            found[name] = partial(self._work, self.worker, operation, blocks, slots)
        blocks, slots = self.ids["scattered"]
        if self.unmoved is not None:
            found["unmoved"] = partial(self._work, self.unmoved, operation, blocks, slots)
        vllm = (
            vllm_copy(*self.ours, operation, blocks, slots) if self.device.type == "cuda" else None
        )
        return found if vllm is None else found | {"vllm": vllm}

    def _copy_one(self, into: torch.Tensor, out_of: torch.Tensor) -> None:
        into.copy_(out_of, non_blocking=True)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def close(self) -> None:
        """End the workers."""
        self.worker.shutdown()
        if self.unmoved is not None:
            self.unmoved.shutdown()

    def _work(
        self, worker: OffloadWorker, operation: str, blocks: np.ndarray, slots: np.ndarray
    ) -> None:
        submit = worker.submit_store if operation == "store" else worker.submit_load
        submit(1, blocks, slots, after=self.computing)
        worker.wait([1])
        (result,) = worker.get_finished()
        if not result.success or result.size_bytes != self.size_bytes:
            raise SystemExit(f"the worker failed: {result}")


def idle_mover(threads: int) -> CPUDevice:
    """A device that does everything but move the bytes."""
    return CPUDevice(threads=threads or None, copy=lambda *_: None)


def vllm_copy(
    kv: torch.Tensor, host: torch.Tensor, operation: str, blocks: np.ndarray, slots: np.ndarray
) -> Callable[[], None] | None:
    """Return vLLM's batched copy of the same pages, where it is installed."""
    try:
        from vllm import _custom_ops as ops
    except ImportError:
        return None
    page_bytes = kv.shape[1]
    on_device = torch.from_numpy(kv.data_ptr() + blocks * page_bytes)
    on_host = torch.from_numpy(host.data_ptr() + slots * page_bytes)
    sizes = torch.full_like(on_device, page_bytes)
    ends = (on_device, on_host) if operation == "store" else (on_host, on_device)

    def copy() -> None:
        ops.swap_blocks_batch(*ends, sizes, is_src_access_order_any=operation == "load")
        torch.cuda.synchronize(kv.device)

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
    for _ in range(rounds):
        for name, copy in copies.items():
            taken_s = sum(seconds(copy) for _ in range(repeats)) / repeats
            rates[name].append(setting.size_bytes / taken_s / 1e9)
    return {
        name: Series(operation, case, name, "throughput", "GB/s", values)
        for name, values in rates.items()
    }


def numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main() -> None:
    """Print one row for each size, number of pages and direction."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help=f"cpu or cuda (default: {default})")
    parser.add_argument("--pages", type=numbers, default="16,256,4096", help="pages in a job")
    parser.add_argument("--kib", type=numbers, default="16,128,2048", help="KiB in a page")
    parser.add_argument("--rounds", type=int, default=9, help="rounds to take medians over")
    parser.add_argument("--max-mib", type=int, default=1024, help="skip jobs that move more")
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
    for kib in arguments.kib:
        for pages in arguments.pages:
            if pages * kib * 1024 > arguments.max_mib * MIB:
                print(f"{pages:5} x {kib:4} KiB  skipped: more than --max-mib")
                continue
            setting = Setting(
                arguments.device, pages, kib * 1024, arguments.spread, arguments.threads
            )
            for operation in ("store", "load"):
                found = measure(setting, f"{pages} x {kib} KiB", operation, arguments.rounds)
                measured += found.values()
                unmoved = found.pop("unmoved", None)
                cells = [
                    f"{name} {rate.median:5.1f} ({rate.relative_to(found['copy_']).median:.2f})"
                    for name, rate in found.items()
                ]
                if unmoved is not None:
                    cells.append(f"unmoved {setting.size_bytes / unmoved.median / 1e3:5.0f} us")
                print(f"{pages:5} x {kib:4} KiB  {operation:5}  {'  '.join(cells)}", flush=True)
            setting.close()
    results.write(arguments.json, measured)


if __name__ == "__main__":
    main()
