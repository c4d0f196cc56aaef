from pathlib import Path

import pytest
from support.keys import OURS, write_keys

from kvtier_sdk.testing import TierConformance


class TestFileTier(TierConformance):
    @pytest.fixture
    def tier(self, tmp_path):
        self.root = tmp_path / "kv"
        return self._entry()

    def read_raw(self, key):
        return self._file(key).read_bytes() if self._file(key).exists() else None

    def write_raw(self, key, data):
        self._file(key).write_bytes(data)

    def bad_settings(self):
        return {
            "a root that is a file": self._entry(root=str(Path(__file__))),
            "capacity below one chunk": self._entry(capacity="4KiB"),
        }

    def small_tier(self, object_bytes):
        return self._entry(root=f"{self.root}-small", capacity=10 * object_bytes)

    def short_lived_tier(self):
        return self._entry(root=f"{self.root}-short-lived", ttl="1s")

    def aging_tier(self):
        return self._entry(root=f"{self.root}-aging", ttl="1s", max_age="2s")

    def _entry(self, **options):
        return {"type": "file", "root": str(self.root), "min_free": 0, **options}

    def _file(self, key):
        directory = self.root / self.namespace.fingerprint
        return next(directory.glob(f"*/{key.hex()}.kv"), directory / "absent")


class TestSealedFileTier(TestFileTier):
    sequences = 3

    @pytest.fixture
    def tier(self, tmp_path):
        self.root = tmp_path / "kv"
        return self._entry(direct_io="off", codec=write_keys(tmp_path / "chunk.keys", OURS))
