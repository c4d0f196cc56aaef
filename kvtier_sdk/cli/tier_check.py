"""Checks of tiers without an engine, but through the client that engines use."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from logging.handlers import BufferingHandler
from typing import cast

import numpy as np

from kvtier_sdk.aio.clock import SystemClock
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.config.tiering_config import TieringConfig
from kvtier_sdk.errors import (
    BackendError,
    ConfigError,
    TierContractError,
    TierError,
    TierTimeoutError,
)
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.opening import BlockingTier, open_pool
from kvtier_sdk.options.model import secrets_of
from kvtier_sdk.options.secrets import MaskingFormatter
from kvtier_sdk.pool import HostPool
from kvtier_sdk.runner.jobs import Job, Verdict, verdict_of
from kvtier_sdk.types import Capability, RequestContext, Usage, make_offload_key

_SLOTS = 2
_WRITTEN, _READ = range(_SLOTS)
_REQUEST = RequestContext("kvtier check")
_USAGE_S = 5.0
_ADVICE: dict[Verdict, str] = {
    Verdict.UNAVAILABLE: (
        "see that the store runs, that its address is right, and that this machine reaches it"
    ),
    Verdict.AUTH: "correct the credentials, or give this user access",
    Verdict.TIMEOUT: "see whether the store is overloaded or out of reach",
    Verdict.CAPACITY: "make room in the store, or give it more",
    Verdict.CONTRACT: "a bug of the backend: use another release of it, and tell its author",
    Verdict.CORRUPT: "do not use this store: what comes back is not what was stored",
}
_INTERRUPTED_S = 0.5
#: A pattern for the frames of a traceback, without the error after the frames.
_FRAMES = re.compile(r":?\n+( *)Traceback \(most recent call last\):\n(?:\1  .*\n)+\1")

_UNEXPECTED = {
    Verdict.OK: "the chunk is there, although it was removed",
    Verdict.NOT_FOUND: "the chunk is not there, although it was stored",
}


class _StepError(Exception):
    def __init__(self, message: str, advice: str | None) -> None:
        super().__init__(message)
        self.advice = advice


def advice_on(error: Exception) -> str | None:
    if isinstance(error, _StepError):
        return error.advice
    return _ADVICE.get(verdict_of(error)) if isinstance(error, TierError) else None


def like_kv(size_bytes: int) -> bytes:
    """Return normally distributed bfloat16 numbers, with exponents like a KV cache's."""
    # Keep only three mantissa bits, so that rounding to fp8 does not change the numbers.
    floats = np.random.default_rng().standard_normal(-(-size_bytes // 2), np.float32)
    floats = np.copysign(np.maximum(np.abs(floats), 2**-10), floats)
    return (floats.view(np.uint32) >> 16 & 0xFFF0).astype(np.uint16).tobytes()[:size_bytes]


@dataclass(slots=True)
class TierCheck:
    """The result for one tier. ``--json`` prints these fields."""

    name: str
    backend: str
    steps_s: dict[str, float] = field(default_factory=dict)
    usage: Usage | None = None
    fault: str | None = None
    advice: str | None = None
    remarks: list[str] = field(default_factory=list)


def check_tiers(
    config: TieringConfig, *, chunk_bytes: int, timeout_s: float
) -> Iterator[TierCheck]:
    """Connect to each tier, and store, look up, load and remove a chunk."""
    # A separate namespace and a random key prevent interference with engines and other checks.
    small = config.model_copy(update={"slots": _SLOTS, "pool_bytes": None, "chunk_bytes": None})
    with open_pool(small, chunk_bytes=chunk_bytes) as pool:
        for spec in config.tiers:
            yield _Check(spec, pool, timeout_s).run()


class _Check:
    def __init__(self, spec: TierSpec, pool: HostPool, timeout_s: float) -> None:
        self._spec = spec
        self._pool = pool
        self._clock = SystemClock()
        self._timeout_s = timeout_s
        self._key = make_offload_key(os.urandom(32), 0xFFFF_FFFF)
        self._outcome = TierCheck(spec.name, spec.backend)
        self._tier: BlockingTier

    def run(self) -> TierCheck:
        with _warnings_of(self._spec.name) as warnings:
            self._check()
        prefix, formatted = f"{self._spec.name}: ", map(MaskingFormatter().format, warnings)
        texts = dict.fromkeys(_FRAMES.sub(": ", text) for text in formatted)
        said = [self._masked(text.removeprefix(prefix)) for text in texts]
        self._outcome.remarks += [text for text in said if text != self._outcome.fault]
        return self._outcome

    def _check(self) -> None:
        try:
            self._tier = self._make_tier()
            client = self._tier.client
            try:
                self._take_steps()
            except KeyboardInterrupt:
                client.close(_INTERRUPTED_S)
                raise
            finally:
                client.close(self._timeout_s)
        except (TierError, _StepError, ConfigError, BackendError) as error:
            self._note_fault(error)
        except Exception as error:  # the backend's constructor or ``open`` raised it
            raised = TierContractError(f"raised {type(error).__name__}: {error}")
            self._note_fault(raised.labelled(self._spec.name, "open"))

    def _make_tier(self) -> BlockingTier:
        names = ("open_deadline_s", "lookup_deadline_s", "load_deadline_s", "store_deadline_s")
        patience = dict.fromkeys(names, self._timeout_s)
        spec = self._spec.needed()
        spec = replace(spec, runner=spec.runner.model_copy(update=patience))
        # The namespace has a dtype, like an engine's, because option 'compress' needs it.
        facts = {"engine": "kvtier check", "dtype": "bfloat16"}
        namespace = Namespace({**facts, "chunk_bytes": self._pool.chunk_bytes})
        return BlockingTier.make(spec, self._pool, namespace, clock=self._clock)

    def _masked(self, text: str) -> str:
        return secrets_of(self._spec.config).mask(text)

    def _note_fault(self, error: Exception) -> None:
        self._outcome.fault = self._masked(str(error))
        self._outcome.advice = advice_on(error)

    def _take_steps(self) -> None:
        pool, options, tier = self._pool, self._spec.runner, self._tier.client
        keys = [self._key]
        with self._step("open", options.open_deadline_s):
            self._open()
        if Capability.USAGE in self._spec.tier_class.capabilities:
            self._outcome.usage = self._usage()
        pool.view(_WRITTEN)[:] = like_kv(pool.chunk_bytes)
        with self._step("store", options.store_deadline_s):
            self._expect(tier.store(keys, [_WRITTEN], _REQUEST, whole=True))
        with self._step("lookup", options.lookup_deadline_s):
            self._expect(tier.lookup(keys, _REQUEST))
        with self._step("load", options.load_deadline_s):
            self._expect(tier.load(keys, [_READ], _REQUEST, whole=True))
        if pool.view(_READ) != pool.view(_WRITTEN):
            raise self._error("load", "another chunk came back", Verdict.CORRUPT)
        if Capability.DELETE not in self._spec.tier_class.capabilities:
            self._outcome.remarks.append(
                f"it cannot delete: a chunk of {pool.chunk_bytes} bytes stays in it"
            )
            return
        with self._step("remove"):
            self._expect(tier.delete(keys, _REQUEST))
            self._expect(tier.lookup(keys, _REQUEST), Verdict.NOT_FOUND)

    def _usage(self) -> Usage | None:
        # Limit the wait, because some stores count their chunks slowly or not at all.
        stats = self._tier.client.stats
        within_s = min(self._timeout_s, _USAGE_S)
        self._tier.wait(lambda: stats.used_bytes is not None, within_s)
        if stats.used_bytes is None:
            self._outcome.remarks.append("it did not report in time how full it is")
            return None
        return Usage(stats.used_chunks, stats.used_bytes, stats.capacity_bytes, stats.free_bytes)

    @contextmanager
    def _step(self, name: str, deadline_s: float | None = None) -> Iterator[None]:
        started_s = self._clock.now_s()
        yield
        taken_s = self._clock.now_s() - started_s
        self._outcome.steps_s[name] = taken_s
        if deadline_s is not None and taken_s > deadline_s:
            self._outcome.remarks.append(
                f"{name} took {taken_s:.3g} s and has {deadline_s:g} s ('{name}_deadline')"
            )

    def _open(self) -> None:
        end_s = self._clock.now_s() + self._timeout_s
        try:
            self._tier.client.open()
        except TierTimeoutError:
            # The check's time limit has not passed, so the tier itself has raised this error.
            if self._clock.now_s() < end_s:
                raise
            message = f"it did not open within {self._timeout_s:g} s"
            raise self._error("open", message, Verdict.TIMEOUT) from None

    def _expect(self, job: Job | None, expected: Verdict = Verdict.OK) -> None:
        result = self._tier.result_of(job)
        (verdict,) = result.verdicts
        if verdict is expected:
            return
        if verdict not in _UNEXPECTED and result.error is not None:
            raise _StepError(result.error, _ADVICE.get(verdict))
        message = _UNEXPECTED.get(verdict, f"no answer within {self._timeout_s:g} s")
        raise self._error(cast(Job, job).operation.value, message, verdict)

    def _error(self, step: str, message: str, verdict: Verdict) -> _StepError:
        advice = _ADVICE.get(verdict)
        if verdict is Verdict.TIMEOUT:
            advice = f"{advice}; --timeout makes the check wait longer"
        return _StepError(f"{self._spec.name} {step}: {message}", advice)


@contextmanager
def _warnings_of(tier: str) -> Iterator[list[logging.LogRecord]]:
    """Yield a list of a tier's warnings in the ``with`` block; keep them out of the log."""
    logger, listener = logging.getLogger(f"kvtier.tier.{tier}"), BufferingHandler(sys.maxsize)
    level, propagate = logger.level, logger.propagate
    listener.setLevel(logging.WARNING)
    logger.addHandler(listener)
    # Set the level, because a tier's process sends only records of at least this level.
    logger.setLevel(logging.WARNING)
    logger.propagate = False
    try:
        yield listener.buffer
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
        logger.propagate = propagate
