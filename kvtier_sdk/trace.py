"""Records a running engine's requests as a block-hash trace for ``kvtier replay``."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
from collections import deque
from collections.abc import Collection, Mapping
from datetime import UTC, datetime
from hashlib import blake2b
from itertools import count
from pathlib import Path

from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.types import OffloadKey

#: Seconds between writes. A killed process loses the requests that ended since the last write.
_INTERVAL_S = 0.5
_MOST_WAITING = 2**12
#: Matches trace-DATE-TIME-PID-NUMBER.jsonl. Files with other names are never removed.
_OUR_FILES = "trace-{0}-{0}-{0}-{0}.jsonl".format("[0-9]*")
_SALT_BYTES = 16
_ID_BYTES = 8

_Finished = tuple[float, Collection[OffloadKey], Mapping[OffloadKey, int]]

_log = logging.getLogger("kvtier.trace")


class TraceRecorder:
    """Writes one line for each request, on a separate thread.

    The lines are in Mooncake's format (FAST '25), with ``chunk_bytes`` added. Salted hashes replace
    the keys. Each recording has a new salt that is never written, so no hash reveals tokens.
    """

    def __init__(
        self, directory: Path, *, file_bytes: int, files: int, chunk_bytes: int, clock: Clock
    ) -> None:
        self._directory = directory
        self._chunk_bytes, self._file_bytes, self._files = chunk_bytes, file_bytes, files
        self._salt = os.urandom(_SALT_BYTES)
        self._started_s = clock.now_s()
        started = datetime.fromtimestamp(clock.wall_s(), UTC)
        self._prefix = f"trace-{started:%Y%m%d-%H%M%S}-{os.getpid()}"
        self.written: int = 0
        # No lock is needed, because only one thread changes each counter.
        self._refused = 0
        self._lost = 0
        self._waiting: deque[_Finished] = deque()
        self._number = 0
        self._fd = -1
        self._size_bytes = 0
        self._is_failing = False
        self._told = 0
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
            self._open_next()
        except OSError as error:
            raise ConfigError(
                f"option 'trace_dir': cannot write into {directory}: {error.strerror}"
            ) from None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvtier-trace", daemon=True)
        self._thread.start()
        _log.info("requests are recorded: %s", self.path)

    @property
    def dropped(self) -> int:
        """Number of requests lost because too many waited or because writing failed."""
        return self._refused + self._lost

    @property
    def path(self) -> Path:
        return self._directory / f"{self._prefix}-{self._number:06}.jsonl"

    def record(
        self, arrived_s: float, named: Collection[OffloadKey], end_tokens: Mapping[OffloadKey, int]
    ) -> None:
        """Queue a finished request to be written. Call this only on the engine's thread."""
        if not named:
            return
        if len(self._waiting) >= _MOST_WAITING:
            self._refused += 1
            return
        self._waiting.append((arrived_s, named, end_tokens))

    def close(self, timeout_s: float = 10.0) -> None:
        """Write the waiting requests, and end the thread. A second call does nothing."""
        self._closed.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._closed.wait(_INTERVAL_S):
            self._write_waiting()
        self._write_waiting()
        if not self._size_bytes:
            self.path.unlink(missing_ok=True)
        os.close(self._fd)

    def _write_waiting(self) -> None:
        for _ in range(len(self._waiting)):
            self._write(self._line(self._waiting.popleft()))
        if missing := self.dropped - self._told:
            _log.warning("%d requests are missing from the trace in %s", missing, self._directory)
            self._told += missing

    def _write(self, line: bytes) -> None:
        try:
            if self._size_bytes and self._size_bytes + len(line) > self._file_bytes:
                self._open_next()
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._fd, rest) :]
            self._size_bytes += len(line)
            self.written += 1
            self._is_failing = False
        except OSError as error:
            with contextlib.suppress(OSError):
                # Remove a partly written line, because the next line would continue it.
                os.ftruncate(self._fd, self._size_bytes)
            self._lost += 1
            if not self._is_failing:
                _log.error("the trace cannot be written: %s: %s", self.path, error.strerror)
            self._is_failing = True

    def _line(self, request: _Finished) -> bytes:
        arrived_s, named, end_tokens = request
        tokens = 0
        if end_tokens:
            tokens = max(end_tokens.get(key, 0) for key in named)
            named = [key for key, end in end_tokens.items() if end <= tokens]
        record = {
            "timestamp": round((arrived_s - self._started_s) * 1000),
            "input_length": tokens,
            "output_length": 0,
            "hash_ids": [self._id(key) for key in named],
            "chunk_bytes": self._chunk_bytes,
        }
        return json.dumps(record).encode() + b"\n"

    def _id(self, key: OffloadKey) -> int:
        digest = blake2b(key, digest_size=_ID_BYTES, key=self._salt).digest()
        # Shift the number so that it fits a signed integer of 64 bits.
        return int.from_bytes(digest, "big") >> 1

    def _open_next(self) -> None:
        """Open the next file, and keep only the newest ``files - 1`` of the finished files."""
        for number in count(self._number + 1):
            path = self._directory / f"{self._prefix}-{number:06}.jsonl"
            # Skip names of another recording that this process began in the same second.
            with contextlib.suppress(FileExistsError):
                fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
                break
        # Lock the file to mark it as unfinished. The kernel releases the lock if the process dies.
        fcntl.flock(fd, fcntl.LOCK_EX)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._number, self._size_bytes = fd, number, 0
        ended = {path: _end_of(path) for path in self._directory.glob(_OUR_FILES)}
        finished = sorted((at, path) for path, at in ended.items() if at is not None)
        for _, path in finished[: max(0, len(finished) + 1 - self._files)]:
            path.unlink(missing_ok=True)


def _end_of(path: Path) -> int | None:
    """Return a file's modification time in ns, or ``None`` if it is unfinished or unreadable."""
    with (
        contextlib.suppress(OSError),
        open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NOFOLLOW)) as file,
    ):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.fstat(file.fileno()).st_mtime_ns
    return None
