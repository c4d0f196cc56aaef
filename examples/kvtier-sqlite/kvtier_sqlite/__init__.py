"""A tier in an SQLite file. Each chunk is a row. Processes on one machine may share the file."""

import sqlite3
import threading
from collections.abc import Callable
from typing import Any

import kvtier_sdk as kv

_SETUP = """PRAGMA journal_mode = wal; CREATE TABLE IF NOT EXISTS
chunks (space TEXT, key BLOB, header BLOB, payload BLOB, UNIQUE (space, key))"""
_MINE = "FROM chunks WHERE space = ? AND key = ?"


class SQLiteTierConfig(kv.TierConfig):
    """Options of the SQLite tier.

    Attributes:
        path: the file, created if it is missing; in a URL ``sqlite:?path=/data/kv.db``.
        max_chunks: the maximum number of chunks. If a store exceeds it, the oldest are removed.
    """

    path: str
    max_chunks: kv.Count = 100_000


class SQLiteTier(kv.ChunkTierManager):
    """A tier that keeps chunks as rows of one table."""

    config_model = SQLiteTierConfig
    capabilities = kv.Capability.DELETE
    contract_version = 1

    async def open(self) -> None:
        self._lock, self._space = threading.Lock(), self.context.namespace.fingerprint
        path = self.config.path
        options: Any = {"isolation_level": None, "check_same_thread": False}
        try:
            self._db = await kv.run_blocking(lambda: sqlite3.connect(path, **options))
            await self._alone(self._db.executescript, _SETUP)
        except (sqlite3.Error, kv.TierError) as error:
            raise kv.ConfigError(f"option 'path', {path}: {error}") from error

    async def contains_chunk(self, key: kv.OffloadKey) -> bool:
        return bool(await self._run(f"SELECT 1 {_MINE}", self._space, key))

    async def store_chunk(self, transfer: kv.Transfer) -> None:
        row = "INSERT OR REPLACE INTO chunks VALUES (?, ?, ?, ?)"
        await self._run(row, self._space, transfer.key, *transfer.buffers)
        oldest = "DELETE FROM chunks WHERE rowid <= (SELECT max(rowid) FROM chunks) - ?"
        gone = await self._run(f"{oldest} RETURNING space, key", self.config.max_chunks)
        mine = [key for space, key in gone if space == self._space]
        self.context.report_removed(mine, evicted=True)

    async def load_chunk(self, transfer: kv.Transfer) -> None:
        rows = await self._run(f"SELECT header, payload {_MINE}", self._space, transfer.key)
        if not rows:
            raise kv.ChunkNotFoundError("no such chunk")
        transfer.fill(b"".join(rows[0]))

    async def delete_chunk(self, key: kv.OffloadKey) -> None:
        await self._run(f"DELETE {_MINE}", self._space, key)

    async def close(self) -> None:
        if hasattr(self, "_db"):
            await self._alone(self._db.close)

    async def _run(self, statement: str, *values: Any) -> Any:
        return await self._alone(lambda: self._db.execute(statement, values).fetchall())

    async def _alone(self, work: Callable[..., Any], *args: Any) -> Any:
        def run() -> Any:
            with self._lock, kv.map_exceptions({sqlite3.Error: kv.TierUnavailableError}):
                return work(*args)

        return await kv.run_blocking(run)
