"""``kvtier check``: reads a configuration and tests its tiers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import typer

from kvtier_sdk.cli.targets import TARGET, TARGET_HELP, Target, read_target
from kvtier_sdk.cli.terminal import JsonOption, read_flag, say
from kvtier_sdk.cli.tier.options import TimeoutOption, read_timeout
from kvtier_sdk.cli.tier_check import TierCheck, check_tiers
from kvtier_sdk.errors import BackendError, ConfigError
from kvtier_sdk.opening import pool_slots
from kvtier_sdk.options.secrets import url_without_password
from kvtier_sdk.options.units import format_bytes, parse_bytes
from kvtier_sdk.pool import HostPool, PoolLayout
from kvtier_sdk.runner.survey import contents_in_words

_CHUNK_BYTES = 64 * 1024
#: The verdict in words for each exit status, 0 to 2.
_VERDICTS = ("ok", "does not work as it is", "is wrong")


@dataclass(slots=True)
class _Findings:
    """The result of the check. ``--json`` prints these fields."""

    file: str
    mistakes: list[str] = field(default_factory=list)
    configuration: Mapping[str, Any] | None = None
    pool_fault: str | None = None
    tiers: list[TierCheck] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        if self.mistakes:
            return 2
        return int(bool(self.pool_fault) or any(trial.fault for trial in self.tiers))


def check_command(
    tiers: Annotated[str, typer.Argument(metavar=TARGET, help=TARGET_HELP)],
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run/--no-dry-run",
            help="Look for room for the host pool, connect to each tier, and write, find, read, "
            "compare and remove a chunk of its own.",
        ),
    ] = True,
    chunk_bytes: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            show_default="the configured one, else 64KiB",
            help="Size of that chunk.",
        ),
    ] = None,
    timeout: TimeoutOption = "30s",
    as_json: JsonOption = False,
) -> None:
    """Check a configuration, show the options in effect, and test its tiers.

    Secrets are masked. The exit status is 0 if all is well, 1 if a tier or the host pool does
    not work, 2 if the configuration or an option is wrong, 3 after an unexpected error.
    """
    size_bytes = None
    if chunk_bytes is not None:
        size_bytes = read_flag("--chunk-bytes", parse_bytes, chunk_bytes)
    timeout_s = read_timeout(timeout)
    findings = _Findings(url_without_password(tiers))
    for line in _check(tiers, findings, size_bytes, timeout_s if dry_run else None):
        if not as_json:
            say(line)
    if as_json:
        print(json.dumps({"ok": findings.status == 0, **asdict(findings)}))
    raise typer.Exit(findings.status)


def _check(
    tiers: str, findings: _Findings, size_bytes: int | None, timeout_s: float | None
) -> Iterator[str]:
    """Fill ``findings``, and yield the text of each finding as soon as it is known."""
    try:
        target = read_target(tiers)
    except (BackendError, ConfigError) as error:
        findings.mistakes = str(error).split("\n")
        yield from findings.mistakes
    else:
        config = target.config.to_dict(defaults=True)
        if target.is_url:
            # A URL configures only a tier, so omit the defaults of all other options.
            config = {"tiers": config["tiers"]}
        findings.configuration = config
        yield from _configuration_lines(config)
        if timeout_s is not None:
            yield from _try_out(target, findings, size_bytes, timeout_s)
    yield f"{findings.file}: {_VERDICTS[findings.status]}"


def _try_out(
    target: Target, findings: _Findings, size_bytes: int | None, timeout_s: float
) -> Iterator[str]:
    config = target.config
    size_bytes = size_bytes or config.chunk_bytes
    if size_bytes is None:
        size_bytes = _CHUNK_BYTES
        findings.remarks.append(
            f"tried with chunks of {format_bytes(size_bytes)}: the configuration does not say how "
            "big they are (--chunk-bytes)"
        )
    if not target.is_url:
        engine = target.engine
        directory = None if engine is None else engine.pool_directory
        try:
            layout = PoolLayout(pool_slots(config, size_bytes), size_bytes)
            HostPool.check(layout, directory=directory)
        except ConfigError as error:
            fault = str(error)
            findings.pool_fault = fault if engine is None else engine.in_its_words(fault)
            yield from ("host pool: FAILED", f"  {findings.pool_fault}")
    for trial in check_tiers(config, chunk_bytes=size_bytes, timeout_s=timeout_s):
        findings.tiers.append(trial)
        yield from _trial_lines(trial)
    yield from (f"note: {remark}" for remark in findings.remarks)


def _configuration_lines(configuration: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options in effect as TOML, without unset options."""
    yield from _option_lines({name: of for name, of in configuration.items() if name != "tiers"})
    for tier in configuration.get("tiers", ()):
        yield from ("", "[[tiers]]", *_option_lines(tier))
    yield ""


def _option_lines(options: Mapping[str, Any]) -> Iterator[str]:
    for name, value in options.items():
        if isinstance(value, Mapping):
            inner = ", ".join(f"{json.dumps(key)} = {json.dumps(of)}" for key, of in value.items())
            yield f"{name} = {{{inner}}}"
        elif value is not None:
            yield f"{name} = {json.dumps(value)}"


def _trial_lines(trial: TierCheck) -> Iterator[str]:
    steps = ", ".join(f"{name} {1e3 * taken_s:.1f} ms" for name, taken_s in trial.steps_s.items())
    yield f"tier {trial.name!r}: {'FAILED' if trial.fault else 'ok'}{steps and f' ({steps})'}"
    if trial.usage:
        yield f"  {contents_in_words(trial.usage)}"
    if trial.fault:
        yield f"  {trial.fault}"
    if trial.advice:
        yield f"  what to do: {trial.advice}"
    for remark in trial.remarks:
        yield f"  note: {remark}"
