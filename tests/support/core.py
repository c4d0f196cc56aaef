from __future__ import annotations

import pytest

from kvtier_sdk.core_form import IS_COMPILED

#: A compiled module has no docstrings, and ignores a test's replacements of its own methods.
pure_core_only = pytest.mark.skipif(IS_COMPILED, reason="needs the pure Python core")
