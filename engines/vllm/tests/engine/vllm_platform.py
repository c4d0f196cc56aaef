from types import SimpleNamespace
from typing import Any

import pytest
from vllm.platforms import current_platform
from vllm.v1.kv_offload.tiering import spec as tiering_spec

from kvtier_vllm import spec as our_spec


def on_platform(monkeypatch: pytest.MonkeyPatch, name: str, device_type: str) -> None:
    facts: dict[str, Any] = {"device_name": name, "device_type": device_type}
    for fact, value in facts.items():
        monkeypatch.setattr(type(current_platform), fact, value, raising=False)
    for known in ("cpu", "rocm"):
        monkeypatch.setattr(
            type(current_platform), f"is_{known}", lambda self, known=known: known == name
        )
    is_gpu = device_type == "cuda"
    monkeypatch.setattr(type(current_platform), "is_cuda_alike", lambda self: is_gpu)
    for spec in (our_spec, tiering_spec):
        # vLLM's worker needs a GPU, so use a substitute that only keeps and releases the memory.
        monkeypatch.setattr(
            spec,
            "CPUOffloadingWorker",
            lambda *, mmap_region, **_: SimpleNamespace(shutdown=mmap_region.cleanup),
        )
