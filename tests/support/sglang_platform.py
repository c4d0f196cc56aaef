"""SGLang without CUDA: import this before anything of SGLang's.

torchvision's compiled part, which declares its operators, is built for another torch. Its Python
registers variants of them when it is imported, and needs the declarations; nothing here calls them.
"""

from __future__ import annotations

import torch

_OPERATORS = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _OPERATORS.define(f"{_name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
