"""Reports versions, the driver, the device's capabilities and the machine's limits."""

from __future__ import annotations

import os
import platform
import resource
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from support.gpu.accelerator import GIB, device, has_device
from support.gpu.figures import Figure

from kvtier_sdk.worker.cuda import CUDADevice


def test_machine(figure: Figure) -> None:
    figure("Python", platform.python_version())
    figure("kernel", f"{platform.system()} {platform.release()} {platform.machine()}")
    figure("torch", torch.__version__)
    figure("CUDA of torch", torch.version.cuda or "none")
    for name in ("numpy", "kvtier-sdk", "kvtier-file", "pydantic", "xxhash", "pytest", "triton"):
        figure(name, _version(name))
    figure("driver", _driver_release())
    if has_device():
        _describe_device(figure)
    _describe_limits(figure)


def _describe_device(figure: Figure) -> None:
    properties = torch.cuda.get_device_properties(device())
    figure("device", properties.name)
    figure("devices that torch sees", torch.cuda.device_count())
    figure("compute capability", f"{properties.major}.{properties.minor}")
    figure("device memory", properties.total_memory / GIB, "GiB")
    figure("batch call that the worker takes", _batch_call())


def _batch_call() -> str:
    # Read a private attribute, because the worker does not publish which batch call it uses.
    batch = getattr(CUDADevice(device()).driver, "_batch", None)
    return "none: run by run" if batch is None else str(batch.__name__)


def _describe_limits(figure: Figure) -> None:
    figure("cores of this process", len(os.sched_getaffinity(0)))
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    figure("host memory", memory_bytes / GIB, "GiB")
    try:
        shm = os.statvfs("/dev/shm")
    except OSError as error:
        figure("/dev/shm", f"none: {error.strerror}")
    else:
        figure("/dev/shm, size", shm.f_blocks * shm.f_frsize / GIB, "GiB")
        figure("/dev/shm, free", shm.f_bavail * shm.f_frsize / GIB, "GiB")
    for name, limit_bytes in zip(
        ("soft", "hard"), resource.getrlimit(resource.RLIMIT_MEMLOCK), strict=True
    ):
        if limit_bytes == resource.RLIM_INFINITY:
            figure(f"memlock limit, {name}", "unlimited")
        else:
            figure(f"memlock limit, {name}", limit_bytes / GIB, "GiB")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _driver_release() -> str:
    try:
        return Path("/proc/driver/nvidia/version").read_text().partition("\n")[0]
    except OSError:
        return "/proc/driver/nvidia/version is not there"
