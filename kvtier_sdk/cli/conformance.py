"""``kvtier conformance``: runs the conformance kit against an installed backend."""

from __future__ import annotations

import asyncio
import json
import platform
from collections import Counter
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated

import typer

from kvtier_sdk.cli.targets import is_url
from kvtier_sdk.cli.terminal import read_settings, say
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.options.model import secrets_of
from kvtier_sdk.registry import available_backends

if TYPE_CHECKING:
    from kvtier_sdk.testing import TierSubject


def conformance_command(
    tier: Annotated[
        str,
        typer.Argument(
            metavar="TYPE_OR_URL", help="A backend's name ('file') or a URL ('file:///tmp/kv')."
        ),
    ],
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION=VALUE", help="An option of the tier; repeat."),
    ] = None,
    record: Annotated[
        typer.FileTextWrite | None,
        typer.Option("--json", metavar="FILE", help="Write the results into this file."),
    ] = None,
) -> None:
    """Run the conformance kit against an installed backend, rule by rule.

    Give it a separate store, because the checks leave chunks there. A rule is skipped if the
    backend does not declare what it needs, or if only a hook of the author's tests can check it.
    The exit status is 1 if a rule fails.

        kvtier conformance file --option root=/tmp/kv --json record.json
    """
    # Import the kit here, so that other commands start without it.
    from kvtier_sdk.testing import TierSubject, run_kit

    named_by = "url" if is_url(tier) else "type"
    options = {**read_settings(option or ()), named_by: tier}
    spec = TierSpec.from_options(options, where="command line")
    info = next(info for info in available_backends() if info.name == spec.backend)
    mask = secrets_of(spec.config).mask
    rules = {}
    count = Counter(passed=0, failed=0, skipped=0)
    subject = TierSubject(spec)
    asyncio.run(_open(subject))
    for found in run_kit(subject):
        why = mask(found.why)
        count[found.result] += 1
        rules[found.check] = f"{found.result}: {why}" if why else found.result
        say(f"{found.result:8} {found.rule}", *(f"  {line}" for line in why.splitlines()))
    summary = ", ".join(f"{number} {result}" for result, number in count.items())
    say(f"{info.distribution} {info.version}: {summary}")
    if record is not None:
        written = {
            "backend": info.name,
            "package": info.distribution,
            "version": info.version,
            "kvtier_sdk": version("kvtier-sdk"),
            "python": platform.python_version(),
            "platform": platform.platform(),
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "summary": summary,
            "rules": rules,
        }
        record.write(json.dumps(written, indent=2) + "\n")
    if count["failed"]:
        raise typer.Exit(1)


async def _open(subject: TierSubject) -> None:
    """Open the tier once, so that an outage or a wrong setting ends the command."""
    async with subject.opened():
        pass
