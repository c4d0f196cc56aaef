"""The options of a tier: the base of a backend's own, and those that every tier has."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import Field, model_validator

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.model import StrictModel
from kvtier_sdk.options.units import Bytes, Count, Seconds
from kvtier_sdk.options.url import TierURL


class TierConfig(StrictModel):
    """The base of every backend's options."""

    @classmethod
    def options_from_url(cls, url: TierURL) -> dict[str, Any]:
        """Turn a URL's parts into options of this model.

        The default takes the query and refuses a host or a path; a backend that gives them a
        meaning overrides it.

        Args:
            url: the parts.

        Returns:
            Options, not yet validated.

        Raises:
            ConfigError: a part has no meaning for this backend.
        """
        if url.host or url.path.strip("/"):
            raise ConfigError(
                f"{url.scheme}: takes no host and no path; write '{url.scheme}:?option=value'"
            )
        return dict(url.options)

    def location(self) -> str | None:
        """Where the chunks are kept, as a URL whose path leads there: ``file:///data/kv``.

        Tiers of one manager may not be inside each other's place, and two in one place must have
        the same options.

        Returns:
            The place, as every tier that shares it would write it; ``None``, the default, where
            a tier shares its place with none.
        """
        return None


class RunnerOptions(StrictModel):
    """Options that every tier has, whatever its backend: how the core treats it.

    Attributes:
        runner: what runs it: ``thread``, a thread of the engine's process; ``process``, a process
            of its own; ``auto`` takes a thread for a tier that keeps its chunks in this machine's
            memory, and a process for the others, if it can.
        store_policy: which chunks it is given, and when: ``through``, ``on_evict``,
            ``after_hits:2``, or one that another package brings.
        offload_policy: ``chunk`` gives it what is new; ``request`` also the other chunks of each
            request, those that are in the primary tier already.
        lookup_deadline_s: a lookup that takes longer is a miss.
        load_deadline_s: a load that takes longer, queueing included, has failed.
        store_deadline_s: a store that takes longer, queueing included, has failed.
        retries: how often a retryable failure is tried again, inside the deadline.
        retry_delay_s: mean pause before the first retry; it doubles, and is jittered.
        concurrency: calls of ``load`` and ``store`` that run at once.
        max_batch_bytes: payload that one call carries at most (one chunk at the least).
        max_queue_bytes: payload that may be under way in each direction; stores beyond it are
            dropped, loads are misses.
        breaker_failures: calls in a row that fail before the tier is not asked any more, reads
            (lookups and loads) and writes counted apart.
        breaker_window: the same happens when half of the last so many calls went wrong.
        probe_interval_s: pause before a tier that is not asked is probed; it doubles with each
            probe that fails.
        max_probe_interval_s: the longest such pause.
    """

    runner: Literal["auto", "thread", "process"] = "auto"
    store_policy: str = "through"
    offload_policy: Literal["chunk", "request"] = "chunk"
    lookup_deadline_s: Seconds = Field(0.05, alias="lookup_deadline")
    load_deadline_s: Seconds = Field(5.0, alias="load_deadline")
    store_deadline_s: Seconds = Field(30.0, alias="store_deadline")
    retries: Count = Field(2, ge=0, le=100)
    retry_delay_s: Seconds = Field(0.02, alias="retry_delay")
    concurrency: Count = Field(8, ge=1, le=1024)
    max_batch_bytes: Bytes = Field(8 * 2**20, alias="max_batch", gt=0)
    max_queue_bytes: Bytes = Field(256 * 2**20, alias="max_queue", gt=0)
    breaker_failures: Count = Field(5, ge=1, le=10_000)
    breaker_window: Count = Field(20, ge=1, le=10_000)
    probe_interval_s: Seconds = Field(1.0, alias="probe_interval", gt=0)
    max_probe_interval_s: Seconds = Field(30.0, alias="max_probe_interval", gt=0)

    @model_validator(mode="after")
    def _check_probe_intervals(self) -> Self:
        if self.max_probe_interval_s < self.probe_interval_s:
            raise ValueError(
                f"option 'max_probe_interval' is {self.max_probe_interval_s:g} s but should be at "
                f"least 'probe_interval', which is {self.probe_interval_s:g} s"
            )
        return self
