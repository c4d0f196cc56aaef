"""Costs of pools and tiers, from a file of prices and the measurements of ``kvtier bench``."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from pydantic import Field

from kvtier_sdk.cli.plan.traffic import Flow
from kvtier_sdk.cli.replay import ReplayRequest
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import ConfigError, ReplayError
from kvtier_sdk.options.files import read_options
from kvtier_sdk.options.model import StrictModel, validate_options
from kvtier_sdk.options.place import Place
from kvtier_sdk.options.tier import BoundedTierConfig
from kvtier_sdk.options.units import Bytes, Seconds

_Price = Annotated[float, Field(gt=0, allow_inf_nan=False)]
DAY_S = 86_400.0
_MONTH_DAYS = 30
_GIB = 2**30


class TierPrices(StrictModel):
    """A kind of tier, as described in ``prices.toml``."""

    url: str
    month: _Price
    million_puts: _Price | None = None
    million_gets: _Price | None = None
    latency_s: Seconds = Field(alias="latency")
    bandwidth_bytes: Bytes = Field(alias="bandwidth", gt=0)
    full_writes: _Price | None = None
    replacement: _Price | None = None

    def measured(self, devices: Path | None) -> TierPrices:
        """Return these prices with the latency and bandwidth that ``kvtier bench`` has measured."""
        backend = self.spec.backend
        if devices is None:
            return self
        try:
            its = [
                (float(of["p50_s"]), float(of["bytes_per_s"]))
                for of in read_options(devices)["measured"]
                if (of["operation"], of["backend"]) == ("load", backend)
            ]
            if not all(rate > 0 for _, rate in its):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise ConfigError(f"{devices}: is not what 'kvtier bench --json' prints") from None
        if not its:
            return self
        latencies_s, rates = zip(*its, strict=True)
        return self.model_copy(
            update={"latency_s": min(latencies_s), "bandwidth_bytes": max(rates)}
        )

    def url_of(self, capacity_bytes: int, *, compresses: bool = False) -> str:
        """Return the tier's URL, with this capacity if the backend has a capacity option."""
        given, options = TierSpec.from_url(self.url), []
        if isinstance(given.config, BoundedTierConfig):
            options.append(f"capacity={capacity_bytes}")
        if compresses and given.runner.compress == "never":
            options.append("compress=always")
        mark = "&" if "?" in self.url else "?"
        return f"{self.url}{mark}{'&'.join(options)}" if options else self.url

    @property
    def spec(self) -> TierSpec:
        return TierSpec.from_url(self.url_of(2**40))


class Prices(StrictModel):
    accelerator_hour: _Price
    memory_month: _Price
    tiers: list[TierPrices] = Field(default_factory=list)


class Work(NamedTuple):
    requests: int
    start_s: float
    span_s: float
    chunk_bytes: int
    recompute_s: float
    compression_ratio: float

    @classmethod
    def of(cls, workload: Sequence[ReplayRequest], *figures: Any) -> Work:
        """Summarize a workload; raise :class:`ReplayError` if it has no duration or no chunks."""
        times = [request.arrived_s for request in workload]
        start_s, requests = min(times), len(workload)
        if max(times) == start_s or not any(request.keys for request in workload):
            raise ReplayError("the trace has no chunks, or all at one time, so there are no rates")
        span_s = (max(times) - start_s) * requests / (requests - 1)
        return cls(requests, start_s, span_s, *figures)

    def held(self, chunks: int) -> int:
        """Return how many compressed chunks fit into the space of ``chunks`` plain chunks."""
        return int(self.compression_ratio * chunks)


class Option(NamedTuple):
    """A host pool, with or without a tier. Costs are per month, requests and writes per day."""

    pool_bytes: int
    tier: str
    tier_bytes: int
    url: str
    pool_chunks: int
    tier_chunks: int
    hit_rate: float
    pool_hit_rate: float
    first_token_s: float
    written_bytes: float
    life_years: float | None
    requests: float | None  # billed requests: stores, loads, and lookups of absent chunks
    storing: float
    computing: float

    @property
    def cost(self) -> float:
        return self.storing + self.computing


def example_prices() -> str:
    return (files("kvtier_sdk.cli.plan") / "prices.toml").read_text(encoding="utf-8")


def read_prices(path: Path | None) -> Prices:
    """Read a file of prices, or for ``None`` the example. Mistakes raise :class:`ConfigError`."""
    options = tomllib.loads(example_prices()) if path is None else read_options(path)
    return validate_options(Prices, options, Place("the example" if path is None else str(path)))


def priced(
    prices: Prices, work: Work, flow: Flow, pool_chunks: int, tier: TierPrices | None, chunks: int
) -> Option:
    """Return the costs and benefits of a pool alone, or with a tier of ``chunks`` chunks."""
    days, size = work.span_s / DAY_S, work.chunk_bytes
    computed = flow.asked - flow.pool_hits - flow.tier_hits
    work_s, stored_bytes = computed * work.recompute_s, size / work.compression_ratio
    written = flow.stored * stored_bytes / days
    computing = work_s / 3600 / days * _MONTH_DAYS * prices.accelerator_hour
    storing = pool_chunks * size / _GIB * prices.memory_month
    url, life, requests = "", None, None
    if tier is not None:
        work_s += flow.tier_hits * stored_bytes / tier.bandwidth_bytes
        work_s += min(flow.tier_hits, work.requests) * tier.latency_s
        storing += chunks * size / _GIB * tier.month
        url = tier.url_of(chunks * size, compresses=work.compression_ratio > 1)
        if tier.full_writes and written:
            life = tier.full_writes * chunks * size / written / 365
            worn_bytes = written * _MONTH_DAYS / tier.full_writes
            storing += worn_bytes / _GIB * (tier.replacement or 0.0)
        if tier.million_puts or tier.million_gets:
            puts, gets = flow.stored / days, (flow.tier_hits + computed) / days
            requests = puts + gets
            paid = puts * (tier.million_puts or 0.0) + gets * (tier.million_gets or 0.0)
            storing += paid * _MONTH_DAYS / 1e6
    return Option(
        pool_bytes=pool_chunks * size,
        tier="-" if tier is None else tier.spec.name,
        tier_bytes=chunks * size,
        url=url,
        pool_chunks=pool_chunks,
        tier_chunks=chunks,
        hit_rate=flow.hit_rate,
        pool_hit_rate=flow.pool_hits / flow.asked,
        first_token_s=work_s / work.requests,
        written_bytes=written,
        life_years=life,
        requests=requests,
        storing=storing,
        computing=computing,
    )
