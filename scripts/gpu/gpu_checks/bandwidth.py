"""GB/s of the worker beside one pinned copy: the worker's benchmark with fewer rounds."""

from __future__ import annotations

import worker_benchmark as benchmark

from gpu_checks.accelerator import GIB, KIB, device, has_device, need_device
from gpu_checks.findings import Findings

_ROUNDS = 5


def check(findings: Findings) -> None:
    """Time each run length and count in both directions; jobs of more than 1 GiB are left out."""
    for layers in (1, 32) if has_device() else (2,):
        for kib in (2, 16, 32, 64, 128, 2048) if has_device() else (16,):
            for pages in (16, 256, 4096) if has_device() else (16,):
                # The largest job of 16 KiB pages: 131,072 runs.
                if layers * pages * kib * KIB <= (2 * GIB if kib == 16 else GIB):
                    _measure(findings, layers, pages, kib)
    need_device("GB/s of a device")


def _measure(findings: Findings, layers: int, pages: int, kib: int) -> None:
    setting = benchmark.Setting(str(device()), pages, kib * KIB, 2, 0, layers)
    try:
        for operation in ("store", "load"):
            case = f"{layers} x {pages} x {kib} KiB"
            found = benchmark.measure(setting, case, operation, _ROUNDS)
            what = f"{operation}, {case}"
            for name, rate in found.items():
                if name in ("planned", "unmoved"):
                    took_us = setting.size_bytes / rate.median / 1e3
                    findings.figure(f"{what}, {name}", took_us, "us")
                    continue
                findings.figure(f"{what}, {name}", rate.median, "GB/s")
                findings.figure(
                    f"{what}, {name}, to copy_", rate.relative_to(found["copy_"]).median
                )
    finally:
        setting.close()
