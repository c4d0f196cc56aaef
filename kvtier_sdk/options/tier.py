"""The base classes of backends' options, and the options that every tier has."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.model import Live, StrictModel
from kvtier_sdk.options.units import Bytes, Count, Flag, Seconds, format_bytes
from kvtier_sdk.options.url import TierURL


class TierConfig(StrictModel):
    """The base class of every backend's options.

    A tier in a separate process receives its options as plain data. Each option's type must accept
    plain data: ``Bytes`` accepts ``4096``.
    """

    @classmethod
    def options_from_url(cls, url: TierURL) -> dict[str, Any]:
        """Extract this model's options from a ``url``, without validating them.

        The default implementation accepts a query, but refuses a host or a path. Override it for a
        backend whose URLs have a host or a path.

        Raises:
            ConfigError: a part of the URL has no meaning for this backend.
        """
        if url.host or url.path.strip("/"):
            raise ConfigError(
                f"{url.scheme}: takes no host and no path; write '{url.scheme}:?option=value'"
            )
        return dict(url.options)

    def location(self) -> str | None:
        """Return the location of the chunks as a URL with a path: ``file:///data/kv``.

        All tiers in one location return the same text. Two tiers of one manager may share a
        location only if their options are equal. No location may be inside another. The default is
        ``None``, for a tier that never shares its location.
        """
        return None


class ExpiringTierConfig(TierConfig):
    """The base class for the options of a tier whose chunks can expire.

    Attributes:
        ttl_s: a chunk expires this long after its last store or use. Default: never.
        max_age_s: a chunk expires this long after it was stored, even if used. Default: never.
    """

    ttl_s: Live[Seconds | None] = Field(None, alias="ttl", ge=0.001)
    max_age_s: Live[Seconds | None] = Field(None, alias="max_age", ge=0.001)

    @model_validator(mode="after")
    def _check_expiry(self) -> Self:
        if self.ttl_s is not None and self.max_age_s is not None and self.max_age_s < self.ttl_s:
            raise ValueError(
                f"option 'max_age' is {self.max_age_s:g} s but should be at least 'ttl', which is "
                f"{self.ttl_s:g} s; a chunk that no use extends needs 'max_age' alone"
            )
        return self

    @property
    def expiry_s(self) -> float | None:
        """Seconds without a store or use after which a chunk has certainly expired."""
        return self.max_age_s if self.ttl_s is None else self.ttl_s


class BoundedTierConfig(ExpiringTierConfig):
    """The base class for the options of a tier that evicts chunks to stay within a capacity.

    Attributes:
        capacity_bytes: limit of the total size of stored objects, headers included. All namespaces
            and processes in one location share the limit; the least recently used chunks are
            evicted first. Default: no limit.
    """

    capacity_bytes: Live[Bytes | None] = Field(None, alias="capacity")

    def check_capacity(self, object_bytes: int) -> None:
        """Raise a :class:`ConfigError` if one stored chunk of ``object_bytes`` does not fit.

        Call it in ``open``: ``self.config.check_capacity(self.context.object_bytes)``.
        """
        if self.capacity_bytes is not None and self.capacity_bytes < object_bytes:
            raise ConfigError(
                f"capacity {format_bytes(self.capacity_bytes)} is below one chunk with its header "
                f"({format_bytes(object_bytes)}); raise option 'capacity' to at least that"
            )


class RunnerOptions(StrictModel):
    """The options of every tier, whatever its backend. They control how the SDK runs the tier.

    Attributes:
        runner: ``thread`` runs the tier in a thread of the engine's process, and ``process`` in a
            separate process. ``auto`` chooses a thread for a tier in this machine's memory, and a
            process for any other tier if a process is possible.
        store_policy: which chunks the tier gets, and when: ``through``, ``on_evict``,
            ``after_hits:2``, ``of_tenant:acme``, or another package's policy.
        admission: ``auto`` gives a full tier only chunks seen before, if this leads to more hits;
            ``off`` gives the tier every chunk that the store policy wants.
        offload_policy: ``chunk`` gives the tier new chunks; ``request`` also gives it the chunks of
            a request that are already in the primary tier.
        codec: the codec that seals the tier's chunks: ``aes-gcm:/etc/kvtier/chunk.keys``, or
            another package's codec.
        compress: ``always`` stores chunks of 16-bit and 8-bit floats in fewer bytes, without any
            loss, but uses processor time; ``auto`` does so when this makes loads faster; ``never``
            stores plain chunks. Every engine reads all these chunks. ``fp8`` rounds 16-bit floats
            to 8 bits; only engines that also round find these chunks.
        required: true if an engine must not start without the tier. Otherwise the engine starts,
            and the tier is opened once its store can be reached.
        open_deadline_s: time after which an attempt to open the tier fails, and a starting engine
            waits no longer for the tier.
        lookup_deadline_s: a slower lookup is a miss, unless recomputing takes even longer.
        max_lookup_deadline_s: limit of a lookup if recomputing takes longer or an unknown time.
        load_deadline_s: a load that takes longer, including the time in the queue, has failed.
        store_deadline_s: a store that takes longer, including the time in the queue, has failed.
        retries: how often a call is retried after retryable failures, within the deadline.
        retry_delay_s: mean pause before the first retry, with jitter; later pauses double.
        concurrency: limit of the number of running calls of ``load`` and ``store``.
        max_batch_bytes: limit of one call's payload; a single larger chunk is allowed.
        max_queue_bytes: limit of the unfinished payload in each direction; a store beyond it is
            dropped, and a load beyond it is a miss.
        breaker_failures: number of failed calls in a row after which the breaker opens, and the
            tier gets no calls; reads (lookups and loads) and writes are counted separately.
        breaker_window: number of recent calls; the breaker also opens if half of them fail.
        probe_interval_s: pause before a tier with an open breaker is probed; the pause doubles with
            each failed probe.
        max_probe_interval_s: the longest pause before a probe.
        scan_interval_s: if chunks are announced to routers (``events_endpoint``), the pause before
            the store is listed again to find other processes' changes; at least nine times as long
            as a listing takes.
    """

    runner: Literal["auto", "thread", "process"] = "auto"
    store_policy: str = "through"
    admission: Live[Literal["auto", "off"]] = "auto"
    offload_policy: Literal["chunk", "request"] = "chunk"
    codec: str | None = None
    compress: Live[Literal["never", "auto", "always", "fp8"]] = "never"
    required: Flag = False
    open_deadline_s: Live[Seconds] = Field(30.0, alias="open_deadline", gt=0)
    lookup_deadline_s: Live[Seconds] = Field(0.05, alias="lookup_deadline")
    max_lookup_deadline_s: Live[Seconds] = Field(1.0, alias="max_lookup_deadline")
    load_deadline_s: Live[Seconds] = Field(5.0, alias="load_deadline")
    store_deadline_s: Live[Seconds] = Field(30.0, alias="store_deadline")
    retries: Live[Count] = Field(2, ge=0, le=100)
    retry_delay_s: Live[Seconds] = Field(0.02, alias="retry_delay")
    concurrency: Count = Field(8, ge=1, le=1024)
    max_batch_bytes: Bytes = Field(8 * 2**20, alias="max_batch", gt=0)
    max_queue_bytes: Bytes = Field(256 * 2**20, alias="max_queue", gt=0)
    breaker_failures: Count = Field(5, ge=1, le=10_000)
    breaker_window: Count = Field(20, ge=1, le=10_000)
    probe_interval_s: Seconds = Field(1.0, alias="probe_interval", gt=0)
    max_probe_interval_s: Seconds = Field(30.0, alias="max_probe_interval", gt=0)
    scan_interval_s: Seconds = Field(60.0, alias="scan_interval", gt=0)

    @property
    def codec_name(self) -> str | None:
        """The codec's name without the argument, such as ``aes-gcm``."""
        return None if self.codec is None else self.codec.partition(":")[0]

    @model_validator(mode="after")
    def _check_probe_intervals(self) -> Self:
        if self.max_probe_interval_s < self.probe_interval_s:
            raise ValueError(
                f"option 'max_probe_interval' is {self.max_probe_interval_s:g} s but should be at "
                f"least 'probe_interval', which is {self.probe_interval_s:g} s"
            )
        return self
