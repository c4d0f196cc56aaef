import sqlite3
from contextlib import closing

import pytest

from kvtier_sdk.testing import TierConformance

WHERE = "WHERE space = ? AND key = ?"


class TestSQLiteTier(TierConformance):
    @pytest.fixture
    def tier(self, tmp_path):
        self.path = tmp_path / "kv.db"
        return f"sqlite:?path={self.path}"

    def read_raw(self, key):
        rows = self._run(f"SELECT header, payload FROM chunks {WHERE}", *self._name(key))
        return b"".join(rows[0]) if rows else None

    def write_raw(self, key, data):
        statement = f"UPDATE chunks SET header = ?, payload = ? {WHERE}"
        self._run(statement, data[:64], data[64:], *self._name(key))

    def bad_settings(self):
        return {"a path that is a directory": f"sqlite:?path={self.path.parent}"}

    def small_tier(self, object_bytes):
        return f"sqlite:?path={self.path}&max_chunks=10"

    def _name(self, key):
        return self.namespace.fingerprint, key

    def _run(self, statement, *values):
        with closing(sqlite3.connect(self.path, isolation_level=None)) as db:
            return db.execute(statement, values).fetchall()
