"""The tier under test, and the hooks that its author provides."""

from __future__ import annotations

import inspect
import logging
import os
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from kvtier_sdk.aio.clock import Clock, SystemClock
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.contract import ReportRemoved, SecondaryTierManager, TierContext
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.tier import RunnerOptions
from kvtier_sdk.registry import BackendInfo, check_backend
from kvtier_sdk.testing.conformance.buffers import LentMemory
from kvtier_sdk.testing.conformance.probe import Probe
from kvtier_sdk.testing.conformance.rules import Hook
from kvtier_sdk.types import OffloadKey, make_offload_key

#: A tier's description in a test: a URL, a dictionary of options, a :class:`~kvtier_sdk.TierSpec`,
#: or a class whose options all have defaults.
TierLike: TypeAlias = str | Mapping[str, Any] | TierSpec | type[SecondaryTierManager]

#: The maximum number of chunks with lent buffers: 1.5 times the largest batch of the checks.
_LENT_CHUNKS = 1536
#: The maximum size of a chunk's buffers besides the payload: header, guards and rounding.
_BESIDE_BYTES = 1 << 15
_MIN_LENT_BYTES = 64 << 20


def tier_spec(tier: TierLike) -> TierSpec:
    if isinstance(tier, TierSpec):
        return tier
    if isinstance(tier, str):
        return TierSpec.from_url(tier)
    if isinstance(tier, Mapping):
        return TierSpec.from_options(tier)
    runner = RunnerOptions.model_validate(dict(tier.runner_defaults))
    return TierSpec("under-test", "under-test", tier, tier.config_model(), runner)


@dataclass
class TierSubject:
    """A tier to check. Each hook can be a plain function or a coroutine function.

    The tier must have room for eight chunks. Each check uses new keys, so a subject can serve any
    number of checks. :class:`TierConformance` describes the hooks (``read_raw``, ``write_raw``,
    ``break_connection``, ``restore_connection``, ``freeze``, ``unfreeze``, ``lose_part``,
    ``bad_settings``, ``small_tier``, ``short_lived_tier`` and ``aging_tier``) and the settings
    (``keeps_chunks``, ``chunk_bytes``, ``timeout_s``, ``blocking_s``, ``settle_s`` and ``hang_s``).

    Attributes:
        tier: a URL, a dictionary of options, a spec, or a class whose options have defaults.
        namespace: the namespace of the chunks; each subject has a new one.
        clock: the source of time and tasks.
    """

    tier: TierLike
    read_raw: Callable[[OffloadKey], bytes | Awaitable[bytes | None] | None] | None = None
    write_raw: Callable[[OffloadKey, bytes], Awaitable[bool | None] | bool | None] | None = None
    break_connection: Callable[[], Awaitable[None] | None] | None = None
    restore_connection: Callable[[], Awaitable[None] | None] | None = None
    freeze: Callable[[], Awaitable[None] | None] | None = None
    unfreeze: Callable[[], Awaitable[None] | None] | None = None
    lose_part: Callable[[OffloadKey], Awaitable[None] | None] | None = None
    bad_settings: Mapping[str, TierLike] | None = None
    small_tier: Callable[[int], TierLike] | None = None
    short_lived_tier: Callable[[], TierLike] | None = None
    aging_tier: Callable[[], TierLike] | None = None
    keeps_chunks: bool = True
    chunk_bytes: int = 4096
    timeout_s: float = 30.0
    blocking_s: float = 1.0
    settle_s: float = 0.1
    hang_s: float = 2.0
    namespace: Namespace = field(default_factory=lambda: TierSubject.new_namespace())
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        self.spec: TierSpec = tier_spec(self.tier)
        place = f"{self.tier_class.__module__}:{self.tier_class.__qualname__}"
        check_backend(
            self.tier_class, BackendInfo(self.spec.name, "this test", "(not loaded)", place)
        )
        self.memory: LentMemory = LentMemory(
            max(_MIN_LENT_BYTES, _LENT_CHUNKS * (self.chunk_bytes + _BESIDE_BYTES))
        )

    @staticmethod
    def new_namespace() -> Namespace:
        """Create a new, unique namespace."""
        return Namespace({"model": "conformance", "run": uuid.uuid4().hex})

    @property
    def tier_class(self) -> type[SecondaryTierManager]:
        """The backend's class."""
        return self.spec.tier_class

    def has(self, hook: Hook) -> bool:
        """Return true if the tier's author has provided the ``hook``."""
        return getattr(self, hook.value) is not None

    async def call(self, hook: Hook, *args: Any) -> Any:
        """Call the author's ``hook`` with ``args``, and return its result."""
        result = getattr(self, hook.value)(*args)
        return await result if inspect.isawaitable(result) else result

    def context(
        self,
        spec: TierSpec | None = None,
        *,
        namespace: Namespace | None = None,
        chunk_bytes: int | None = None,
        report_removed: ReportRemoved | None = None,
        maintenance: bool = False,
    ) -> TierContext:
        """Create the context of a tier, by default with the subject's own values.

        ``report_removed`` receives the keys that the tier reports as removed. ``spec``,
        ``namespace``, ``chunk_bytes`` and ``maintenance`` are as in :class:`TierContext`. Chunks of
        another length are in another namespace, unless ``namespace`` is given.
        """
        if chunk_bytes is not None:
            namespace = namespace or self.namespace.for_chunks(chunk_bytes)
        spec = spec or self.spec
        chunk_bytes = chunk_bytes or self.chunk_bytes
        header_bytes, payload_bytes = spec.object_lengths(chunk_bytes)
        return TierContext(
            name=spec.name,
            namespace=namespace or self.namespace,
            chunk_bytes=chunk_bytes,
            header_bytes=header_bytes,
            payload_bytes=payload_bytes,
            clock=self.clock,
            logger=logging.getLogger(f"kvtier.tier.{spec.name}"),
            report_removed=report_removed or (lambda keys, **why: None),
            regions=(self.memory.region,),
            maintenance=maintenance,
            digest_bytes=chunk_bytes,
        )

    def make(self, spec: TierSpec | None = None, **context: Any) -> SecondaryTierManager:
        """Create an unopened instance of ``spec``; pass ``context`` on to :meth:`context`."""
        spec = spec or self.spec
        return spec.tier_class(spec.config, self.context(spec, **context))

    @asynccontextmanager
    async def opened(self, spec: TierSpec | None = None, **context: Any) -> AsyncIterator[Probe]:
        """Open an instance from :meth:`make`, with ``spec`` and ``context``; yield its probe."""
        probe = Probe(self, self.make(spec, **context))
        try:
            await probe.open()
            yield probe
        finally:
            await probe.clean_up()

    def new_keys(self, count: int) -> list[OffloadKey]:
        """Generate ``count`` unused keys of 36 bytes."""
        return [make_offload_key(self.new_hash()) for _ in range(count)]

    def new_hash(self) -> bytes:
        """Generate an unused chain hash of 32 bytes."""
        return os.urandom(32)
