"""``kvtier conformance``: runs the conformance kit against an installed backend."""

from __future__ import annotations

import asyncio
import json
import platform
import re
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from kvtier_sdk.cli.targets import is_url
from kvtier_sdk.cli.terminal import read_settings, say
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.options.model import secrets_of
from kvtier_sdk.registry import available_backends

if TYPE_CHECKING:
    from kvtier_sdk.testing import TcpProxy, TierSubject


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
    outages: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT",
            help="The store's address, as it stands in the URL or an option. The kit's proxy takes "
            "its place, to cut and freeze the connections; not for TLS or clusters.",
        ),
    ] = None,
    record: Annotated[
        typer.FileTextWrite | None,
        typer.Option("--json", metavar="FILE", help="Write the results into this file."),
    ] = None,
) -> None:
    """Run the conformance kit against an installed backend, rule by rule.

    Use a separate store, because the checks leave chunks there. A rule is skipped if it needs an
    ability that the backend does not declare, or a hook from its author's tests.
    The exit status is 1 if a rule fails.

        kvtier conformance file --option root=/tmp/kv --json record.json
    """
    # Import the kit here, so that other commands start without it.
    from kvtier_sdk.testing import TierSubject, run_kit

    named_by = "url" if is_url(tier) else "type"
    options = {**read_settings(option or ()), named_by: tier}
    hooks: dict[str, Any] = {}
    if outages is not None:
        proxy = _proxy(outages)
        options = _moved(options, outages, f"127.0.0.1:{proxy.port}")
        hooks = {
            "break_connection": proxy.cut,
            "restore_connection": proxy.restore,
            "freeze": proxy.freeze,
            "unfreeze": proxy.unfreeze,
        }
    spec = TierSpec.from_options(options, where="command line")
    info = next(info for info in available_backends() if info.name == spec.backend)
    mask = secrets_of(spec.config).mask
    rules = {}
    count = Counter(passed=0, failed=0, skipped=0)
    subject = TierSubject(spec, **hooks)
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


def _proxy(address: str) -> TcpProxy:
    from kvtier_sdk.testing import TcpProxy

    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(f"--outages is {address!r}: write the store's HOST:PORT")
    return TcpProxy(host.strip("[]"), int(port))


def _moved(options: Mapping[str, str], address: str, proxy: str) -> dict[str, str]:
    """Replace the store's address in the options by the proxy's address."""
    moved = dict(options)
    for old, new in ((address, proxy), (quote(address, ""), quote(proxy, ""))):
        whole = re.compile(rf"(?<![\w.-]){re.escape(old)}(?!\d)")
        moved = {name: whole.sub(new, value) for name, value in moved.items()}
    if moved == dict(options):
        raise ConfigError(f"--outages: no option contains the address {address}")
    return moved


async def _open(subject: TierSubject) -> None:
    """Open the tier once, so that an outage or a wrong setting ends the command."""
    async with subject.opened():
        pass
