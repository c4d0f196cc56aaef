from __future__ import annotations

from typing import Protocol


class Figure(Protocol):
    def __call__(self, name: str, value: float | str, unit: str = "") -> None: ...
