"""Workloads for a replay: a block-hash trace, or generated chats."""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import json
import math
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kvtier_sdk.errors import ReplayError
from kvtier_sdk.types import OffloadKey, RequestContext, make_offload_key

_CHAT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """One request of a workload.

    Attributes:
        keys: the chunks, in prefix order.
        chunk_bytes: length of a chunk, if known.
        arrived_s: time of the request's arrival.
        session: the conversation that the request continues or begins, if known.
        stop: the reason why the answer ended, if known.
        resume_in_s: the time until the session's next request, for the policy; infinite after a
            session's last request, and ``None`` if the policy does not receive the time.
        tokens: length of the prompt; 0 if unknown.
    """

    request_id: str
    keys: tuple[OffloadKey, ...]
    chunk_bytes: int | None = None
    arrived_s: float = 0.0
    session: str | None = None
    stop: str | None = None
    resume_in_s: float | None = None
    tokens: int = 0

    @property
    def context(self) -> RequestContext:
        """The request's context for the manager and the policy."""
        return RequestContext(self.request_id, resume_in_s=self.resume_in_s)


def _key(*parts: object) -> OffloadKey:
    return make_offload_key(hashlib.sha256(repr(parts).encode()).digest())


@functools.cache
def _trace_key(block_id: int) -> OffloadKey:
    # Cache the keys, because a long trace names each block many times.
    return _key("trace", block_id)


def read_trace(path: Path) -> list[ReplayRequest]:
    """Read a block-hash trace: a file, or all ``*.jsonl`` and ``*.jsonl.gz`` files of a directory.

    The format was published with Mooncake (FAST '25). Each line is a JSON object. Its ``hash_ids``
    name the blocks of the prompt; equal prefixes have equal ids. Each block becomes a chunk.
    Optional fields: ``timestamp`` in ms orders the requests (default: one request per second).
    Traces of agents add ``session`` and ``stop``. Traces that an engine has recorded add
    ``chunk_bytes``.
    """
    files = sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")]) if path.is_dir() else [path]
    requests: list[ReplayRequest] = []
    for file in files:
        requests += _read_file(file, f"{file.stem}-" if len(files) > 1 else "")
    if not requests:
        raise ReplayError(f"trace {path} holds no request")
    return requests


def _read_file(path: Path, prefix: str) -> list[ReplayRequest]:
    requests = []
    try:
        opener = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    requests.append(_parse_line(line, number, path, prefix))
                except ReplayError:
                    # Ignore an incomplete last line, which an engine leaves when it is killed.
                    if line.endswith("\n"):
                        raise
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        raise ReplayError(f"trace {path}: {reason}") from None
    except UnicodeDecodeError:
        raise ReplayError(f"trace {path} is not UTF-8 text") from None
    return sorted(requests, key=lambda request: request.arrived_s)


def _parse_line(line: str, number: int, path: Path, prefix: str) -> ReplayRequest:
    where = f"{path}, line {number}"
    try:
        record = json.loads(line)
    except ValueError as error:
        raise ReplayError(f"{where}: not JSON: {error}") from None
    ids = record.get("hash_ids") if isinstance(record, dict) else None
    if not isinstance(ids, list) or not all(type(block_id) is int for block_id in ids):
        raise ReplayError(f"{where}: 'hash_ids' should be a list of integers")
    arrived = record.get("timestamp", 1000 * number)
    if type(arrived) not in (int, float):
        raise ReplayError(f"{where}: 'timestamp' should be a number")
    size = record.get("chunk_bytes")
    if size is not None and (type(size) is not int or size < 1):
        raise ReplayError(f"{where}: 'chunk_bytes' should be a number of bytes")
    keys = tuple(map(_trace_key, ids))
    session, stop = (
        None if record.get(field) is None else str(record[field]) for field in ("session", "stop")
    )
    tokens = record.get("input_length")
    return ReplayRequest(
        *(f"{prefix}line-{number}", keys, size, arrived / 1000, session, stop),
        tokens=tokens if type(tokens) is int and tokens > 0 else 0,
    )


def told(workload: Sequence[ReplayRequest], error: float, seed: int) -> list[ReplayRequest]:
    """Return a workload in which each request has the time until its session's next request."""
    if not all(request.session for request in workload):
        raise ReplayError("the trace names no sessions, so nothing can be told about their turns")
    rng = random.Random(seed)
    next_s: dict[str | None, float] = {}
    requests = []
    for request in reversed(workload):
        wait_s = next_s.get(request.session, math.inf) - request.arrived_s
        next_s[request.session] = request.arrived_s
        # Multiply the time by e^x, where x is normally distributed with mean 0 and standard
        # deviation ``error``. The time after a session's last request is infinite.
        factor = math.exp(rng.gauss(0, error))
        requests.append(dataclasses.replace(request, resume_in_s=wait_s * factor))
    return requests[::-1]


def common_chunk_bytes(workload: Sequence[ReplayRequest]) -> int | None:
    """Return the chunk length of all requests, or ``None`` if the lengths differ."""
    sizes = {request.chunk_bytes for request in workload}
    return sizes.pop() if len(sizes) == 1 else None


def chat_workload(requests: int, seed: int) -> list[ReplayRequest]:
    """Generate interleaved chats of several turns that share a few system prompts.

    Each turn's prompt is the whole conversation so far, which begins with the previous prompt.
    """
    rng = random.Random(seed)
    systems = [
        [_key("system", seed, prompt, n) for n in range(rng.randint(4, 16))] for prompt in range(4)
    ]
    open_chats: list[tuple[int, list[OffloadKey], int]] = []
    started = 0
    workload = []
    for number in range(requests):
        if len(open_chats) < 8 or rng.random() < 0.2:
            # Prefer the first system prompts, so that most conversations share them.
            system = systems[min(int(rng.expovariate(1.0)), len(systems) - 1)]
            open_chats.append((started, list(system), rng.randint(1, 10)))
            started += 1
        chat, keys, turns = open_chats.pop(rng.randrange(len(open_chats)))
        for _ in range(rng.randint(1, 6)):
            keys.append(_key("chat", seed, chat, len(keys)))
        name, arrived_s = f"chat-{number}", float(number)
        workload.append(ReplayRequest(name, tuple(keys), _CHAT_BYTES, arrived_s=arrived_s))
        if turns > 1:
            open_chats.append((chat, keys, turns - 1))
    return workload
