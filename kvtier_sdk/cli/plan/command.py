"""``kvtier plan``: suggests a pool and a tier for the traffic in a trace."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier_sdk.cli.drawing import Chart, Series, document, figure, table
from kvtier_sdk.cli.plan.compare import TITLES, compared
from kvtier_sdk.cli.plan.prices import Option, Prices, Work, example_prices, priced, read_prices
from kvtier_sdk.cli.plan.traffic import Flow, Traffic, Window
from kvtier_sdk.cli.replay import ReplayRequest, read_trace
from kvtier_sdk.cli.replay.workload import common_chunk_bytes
from kvtier_sdk.cli.terminal import JsonOption, print_columns, progress, read_flag, say
from kvtier_sdk.config.tiering_config import place_of_socket
from kvtier_sdk.errors import BackendError, ConfigError
from kvtier_sdk.options.units import format_bytes, format_seconds, parse_bytes, parse_seconds

_TITLES = (
    *("pool", "tier", "size", "hits", "in pool", "first token", "written/day", "life"),
    *("requests/day", "storing", "computing", "both"),
)
#: A more expensive option must shorten the time to the first token by at least this share.
_WORTHWHILE = 0.01


def _show_prices(wanted: bool) -> None:
    if wanted:
        print(example_prices(), end="")
        raise typer.Exit


def plan_command(
    trace: Annotated[
        Path,
        typer.Option(
            metavar="PATH",
            help="A trace of your traffic, as for 'kvtier replay': a file, or the directory that "
            "an engine records into.",
        ),
    ],
    recompute: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="Time in which your engine computes a chunk, for example 40ms; an engine shows "
            "it as kvtier_recompute_seconds. --compare does not need it.",
        ),
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="SOCKET",
            parser=place_of_socket,
            help="Compare the forecast for an engine's recording since its start with the counters "
            "behind its 'admin_socket'.",
        ),
    ] = None,
    chunk_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            show_default="an engine's trace says it",
            help="Size of a chunk: its tokens times your model's bytes a token.",
        ),
    ] = None,
    prices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="What you pay, in TOML; --example-prices prints such a file."
        ),
    ] = None,
    devices: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Tiers' latency and bandwidth, as 'kvtier bench --json' prints."
        ),
    ] = None,
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="The most memory for the host pool.")
    ] = None,
    policy: Annotated[
        str, typer.Option(metavar="NAME", help="Eviction policy of the host pool.")
    ] = "returns",
    compression_ratio: Annotated[
        float,
        typer.Option(
            metavar="RATIO",
            min=1,
            max=2,
            help="How much smaller a tier with 'compress' makes chunks; 'kvtier tier du' shows it.",
        ),
    ] = 1.0,
    show_all: Annotated[
        bool, typer.Option("--all", help="Show every option, not only the best for its money.")
    ] = False,
    write: Annotated[
        typer.FileTextWrite | None,
        typer.Option(metavar="FILE", help="Write the suggested configuration, in TOML."),
    ] = None,
    report_file: Annotated[
        typer.FileTextWrite | None,
        typer.Option("--report", metavar="FILE", help="Write a page with charts, in HTML."),
    ] = None,
    show_prices: Annotated[
        bool,
        typer.Option(
            "--example-prices",
            callback=_show_prices,
            is_eager=True,
            help="Print a file for --prices, and end.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Forecast hits, first token, wear and costs of pools with and without a tier; suggest one.

    The forecast begins where the trace ends, is as long as the trace, and assumes an idle engine.
    Each option shown has the shortest time to the first token at its cost. The suggested option has
    the lowest cost of storing and computing together. For example

        kvtier plan --trace traces/ --recompute 40ms --write kv.toml

    and later, to see whether the plan holds

        kvtier plan --trace traces/ --compare engine.sock
    """
    if compare is not None:
        found = compared(read_trace(trace), policy, compare)
        if as_json:
            print(json.dumps(found.as_json()))
        else:
            print_columns([TITLES, *(of.cells() for of in found.rows)], 1)
            say(found.verdict())
        return
    if recompute is None:
        raise ConfigError("--recompute: give the time in which your engine computes a chunk")
    recompute_s = read_flag("--recompute", parse_seconds, recompute)
    most_bytes = None if memory is None else read_flag("--memory", parse_bytes, memory)
    costs = read_prices(prices)
    remarks, usable = [], []
    for tier in costs.tiers:
        try:
            usable.append(tier.measured(devices))
        except BackendError as error:
            remarks.append(f"left out: {error}")
    costs = costs.model_copy(update={"tiers": usable})
    workload = read_trace(trace)
    size = common_chunk_bytes(workload)
    if chunk_bytes is not None:
        size = read_flag("--chunk-bytes", parse_bytes, chunk_bytes)
    if size is None:
        raise ConfigError(f"--trace {trace}: it does not say how large a chunk is: --chunk-bytes")
    work = Work.of(workload, size, recompute_s, compression_ratio)
    plan = _plan(workload, work, costs, policy, most_bytes, show_all=show_all)
    if write is not None:
        write.write(plan.toml)
    if report_file is not None:
        report_file.write(_page(plan, trace.name))
    if as_json:
        print(json.dumps(plan.as_json()))
        return
    say(*remarks)
    print_columns([_TITLES, *map(_row, plan.options)], 2)
    say(*plan.lines(), "", *plan.toml.splitlines())


@dataclass(frozen=True, slots=True)
class Plan:
    """The options; ``checks`` has their forecast and actual flows in the trace's second half."""

    policy: str
    options: Sequence[Option]
    nothing: Option
    checks: Sequence[tuple[Flow, ...]]

    @property
    def best(self) -> Option:
        return min(self.options, key=lambda option: option.cost)

    @property
    def toml(self) -> str:
        tier = f'\n[[tiers]]\nurl = "{self.best.url}"\n' if self.best.url else ""
        return f'pool_bytes = {self.best.pool_bytes}\npolicy = "{self.policy}"\n{tier}'

    def errors(self) -> tuple[float, float]:
        """Return the largest error of a hit rate, and the largest relative error of the stores."""
        pairs = [tuple(half.stored / max(1.0, half.asked) for half in of) for of in self.checks]
        return (
            max(abs(of.hit_rate - fact.hit_rate) for of, fact in self.checks),
            max((abs(of / fact - 1) for of, fact in pairs if fact), default=0.0),
        )

    def as_json(self) -> dict[str, Any]:
        hits, written = self.errors()
        return {
            "options": [option._asdict() for option in self.options],
            "suggested": self.best._asdict(),
            "without": self.nothing._asdict(),
            "hit_rate_error": hits,
            "written_error": written,
        }

    def lines(self) -> Iterator[str]:
        (hits, written), (of, fact) = self.errors(), self.checks[0]
        yield (
            f"without a cache: first token {format_seconds(self.nothing.first_token_s)}, computing "
            f"{self.nothing.computing:,.0f}; costs are of a month"
        )
        yield (
            f"the first half of the trace forecasts the second within {100 * hits:.1f} points of "
            f"hits and {written:.1%} of the bytes written for a chunk; the second asks for "
            f"{fact.asked / max(1.0, of.asked):.2f} times as much"
        )
        best = self.best
        worn = "" if best.life_years is None else f"; the disk lasts {_life(best.life_years)}"
        yield f"Suggested: {_words(best)}, for {best.cost:,.0f} a month{worn}"
        if best.url:
            yield f"kvtier vllm-config '{best.url}' --pool {best.pool_bytes} > kv.json"


def _plan(
    workload: Sequence[ReplayRequest],
    work: Work,
    prices: Prices,
    policy: str,
    most_bytes: int | None,
    *,
    show_all: bool,
) -> Plan:
    start_s, middle_s, end_s = (work.start_s + part * work.span_s for part in (0, 0.5, 1))
    traffic = Traffic(workload)
    pools = [
        of for of in traffic.sizes if most_bytes is None or of * work.chunk_bytes <= most_bytes
    ]
    if not pools:
        least = format_bytes(traffic.sizes[0] * work.chunk_bytes)
        raise ConfigError(f"--memory: the longest request needs a pool of {least}")
    options: list[Option] = []
    whole = Window(start_s, end_s, is_forecast=True)
    with progress("plan", len(pools)) as advance:
        for slots in pools:
            for chunks in (0, *(of for of in traffic.sizes if of > slots)):
                flow = traffic.flow(policy, slots, work.held(chunks), whole)
                options += [
                    priced(prices, work, flow, slots, tier, chunks)
                    for tier in (prices.tiers if chunks else [None])
                ]
            advance(1)
    shown = list(options if show_all else _frontier(options))
    halves = Window(start_s, middle_s, is_forecast=True), Window(middle_s, end_s)
    checks = [
        tuple(
            traffic.flow(policy, of.pool_chunks, work.held(of.tier_chunks), half) for half in halves
        )
        for of in shown
    ]
    nothing = priced(prices, work, Flow(flow.asked, 0.0, 0.0, 0.0), 0, None, 0)
    return Plan(policy, shown, nothing, checks)


def _frontier(options: Sequence[Option]) -> Iterator[Option]:
    best_s = float("inf")
    for option in sorted(options, key=lambda of: (of.storing, of.first_token_s)):
        if option.first_token_s < (1 - _WORTHWHILE) * best_s:
            best_s = option.first_token_s
            yield option


def _words(of: Option) -> str:
    tier = f", {of.tier} of {format_bytes(of.tier_bytes)}" if of.url else ""
    return f"pool of {format_bytes(of.pool_bytes)}{tier}"


def _row(of: Option) -> tuple[str, ...]:
    return (
        format_bytes(of.pool_bytes),
        of.tier,
        format_bytes(of.tier_bytes) if of.url else "-",
        f"{of.hit_rate:.1%}",
        f"{of.pool_hit_rate:.1%}",
        format_seconds(of.first_token_s),
        format_bytes(of.written_bytes) if of.url else "-",
        "-" if of.life_years is None else _life(of.life_years),
        "-" if of.requests is None else f"{of.requests:,.0f}",
        *(f"{cost:,.0f}" for cost in (of.storing, of.computing, of.cost)),
    )


def _life(years: float) -> str:
    return f"{years:.1f} years" if years >= 1 else f"{365 * years:.0f} days"


def _page(plan: Plan, name: str) -> str:
    heads = [_words(of) for of in plan.options]
    labels = [f"{of.storing:,.0f}" for of in plan.options]
    marks = [(float(plan.options.index(plan.best)), "suggested")]

    def draw(title: str, note: str, text: Any, **parts: Sequence[float]) -> str:
        colors = zip(parts.items(), ("host", "tier1"), strict=False)
        series = [Series(part, color, values) for (part, values), color in colors]
        unit = "cost of storing, a month"
        return figure(Chart("columns", title, note, unit, heads, labels, series, text, 0.0, marks))

    options = plan.options
    charts = (
        draw(
            "Hit rate",
            "Chunks that need not be computed, by the place where they are found.",
            "{:.1%}".format,
            pool=[of.pool_hit_rate for of in options],
            tier=[of.hit_rate - of.pool_hit_rate for of in options],
        ),
        draw(
            "Costs of a month",
            "Memory, disk and requests; and the accelerator's time for what is not found.",
            "{:,.0f}".format,
            storing=[of.storing for of in options],
            computing=[of.computing for of in options],
        ),
        draw(
            "First token",
            "Mean time to compute and to load what a request names, on an idle engine.",
            format_seconds,
            mean=[of.first_token_s for of in options],
        ),
        draw(
            "Written in a day",
            "Bytes that the tier gets.",
            format_bytes,
            written=[of.written_bytes for of in options],
        ),
    )
    words = "".join(f"<p>{escape(line)}</p>" for line in plan.lines())
    return document(
        f"kvtier plan: {name}",
        f"<header><h1>Plan for {escape(name)}</h1>{words}</header>"
        f'<main class="charts">{"".join(charts)}</main>'
        f"<section><h2>Options</h2>{table(_TITLES, *map(_row, options))}</section>"
        f"<section><h2>Suggested</h2><pre>{escape(plan.toml)}</pre></section>",
    )
