from types import SimpleNamespace
from typing import Any

import pytest

from kvtier_lmcache.l1_memory import l1_memory
from kvtier_sdk import ConfigError


@pytest.mark.parametrize(
    ("description", "advice"),
    [
        (SimpleNamespace(ptr=8192, size=4096, align_bytes=512), "give --l1-align-bytes 4096"),
        (SimpleNamespace(ptr=8192 + 512, size=4096, align_bytes=4096), "give --l1-align-bytes"),
        (None, "--gds-l1-path"),
    ],
)
def test_an_l1_without_pages_of_memory_is_refused(description: Any, advice: str) -> None:
    with pytest.raises(ConfigError, match=advice):
        l1_memory(description)
