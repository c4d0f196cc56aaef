"""Makes SGLang importable without CUDA; import this module before SGLang.

The Python part of torchvision needs the declarations of two operators at import. The compiled part
would declare the operators, but is built for another torch, so this module declares them. Warnings
during SGLang's import, mostly about missing GPUs, are ignored.
"""

from __future__ import annotations

import warnings

from torch import library

_OPERATORS = library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import sglang.srt.managers.cache_controller
    import sglang.srt.mem_cache.storage
    import sglang.srt.observability.metrics_collector  # noqa: F401
