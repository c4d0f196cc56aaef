"""Makes SGLang importable without CUDA; import this module before SGLang.

The Python part of torchvision needs the declarations of two operators at import. The compiled part
of torchvision is built for another torch, so this module declares the operators.
"""

from __future__ import annotations

import warnings

from torch import library

_OPERATORS = library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")

with warnings.catch_warnings():
    # Ignore SGLang's warnings about missing GPUs.
    warnings.simplefilter("ignore")
    import sglang.srt.managers.cache_controller
    import sglang.srt.mem_cache.storage
    import sglang.srt.observability.metrics_collector  # noqa: F401
