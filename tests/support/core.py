from __future__ import annotations

import pytest

from kvtier_sdk.core_form import IS_COMPILED

#: A compiled module has no docstrings, and calls its own methods even if a test patches them.
pure_core_only = pytest.mark.skipif(IS_COMPILED, reason="needs the pure Python core")
