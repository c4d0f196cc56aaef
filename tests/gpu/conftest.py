from __future__ import annotations

from collections.abc import Callable

import pytest
from support.gpu.figures import Figure


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    def report(name: str, value: float | str, unit: str = "") -> None:
        text = value if isinstance(value, str) else f"{value:,}"
        if isinstance(value, float):
            text = f"{value:,.4g}"
        text = f"{text} {unit}".rstrip()
        print(f"   {name:<58} {text}", flush=True)
        record_property(name, text)

    return report
