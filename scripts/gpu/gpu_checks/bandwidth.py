"""GB/s of the worker beside one pinned copy: the worker's benchmark with fewer rounds."""

from __future__ import annotations

import worker_benchmark as benchmark

from gpu_checks.accelerator import GIB, KIB, device, has_device, need_device
from gpu_checks.findings import Findings

_ROUNDS = 5


def check(findings: Findings) -> None:
    """Time each run length and count in both directions; jobs of more than 1 GiB are left out."""
    for kib in (2, 16, 128, 2048) if has_device() else (16,):
        for runs in (16, 256, 4096, 65536) if has_device() else (16,):
            if runs * kib * KIB <= GIB:
                _measure(findings, runs, kib)
    need_device("GB/s of a device")


def _measure(findings: Findings, runs: int, kib: int) -> None:
    setting = benchmark.Setting(str(device()), runs, kib * KIB, spread=2, threads=0)
    try:
        for operation in ("store", "load"):
            for name, (rate, ratio) in benchmark.measure(setting, operation, _ROUNDS).items():
                what = f"{operation}, {runs} x {kib} KiB, {name}"
                findings.figure(what, rate, "GB/s")
                findings.figure(f"{what}, to copy_", ratio)
    finally:
        setting.close()
