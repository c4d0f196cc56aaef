"""The ``kvtier`` commands, and the exit status after each kind of error."""

from __future__ import annotations

import io
import logging
import os
import traceback
from importlib.metadata import version
from typing import Annotated, Any

import typer

from kvtier_sdk.cli import engine
from kvtier_sdk.cli.backends import backends_command
from kvtier_sdk.cli.bench import bench_command
from kvtier_sdk.cli.check import check_command
from kvtier_sdk.cli.conformance import conformance_command
from kvtier_sdk.cli.metrics import metrics_app
from kvtier_sdk.cli.new_backend import new_backend_command
from kvtier_sdk.cli.plan.command import plan_command
from kvtier_sdk.cli.replay.command import replay_command
from kvtier_sdk.cli.targets import installed_engines
from kvtier_sdk.cli.terminal import TerminalFormatter, say
from kvtier_sdk.cli.tier.copy import copy_command
from kvtier_sdk.cli.tier.du import du_command
from kvtier_sdk.cli.tier.explain import explain_command
from kvtier_sdk.cli.tier.ls import ls_command
from kvtier_sdk.cli.tier.rm import rm_command
from kvtier_sdk.cli.tier.verify import verify_command
from kvtier_sdk.cli.tier_check import advice_on
from kvtier_sdk.cli.top import top_command
from kvtier_sdk.core_form import CORE
from kvtier_sdk.errors import KVTierError, TierError
from kvtier_sdk.options.secrets import without_password

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    # Disable typer's tracebacks: in some releases they show local variables and so passwords.
    pretty_exceptions_enable=False,
    help="Offloading the KV cache of large language models through tiers of memory and storage.",
)

tier_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look into tiers, and keep them in order, beside the engines that use them.",
)


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kvtier {version('kvtier-sdk')} ({CORE} core)")
        raise typer.Exit


@app.callback()
def _root(
    show_version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    logging.basicConfig(level=logging.ERROR)
    for handler in logging.getLogger().handlers:
        handler.setFormatter(TerminalFormatter("%(levelname)s %(asctime)s [%(name)s] %(message)s"))
    logging.getLogger("kvtier").setLevel(logging.WARNING)


# The help keeps this order, because an operator typically needs the commands in this order.
app.command("check")(check_command)
tier_app.command("ls")(ls_command)
tier_app.command("du")(du_command)
tier_app.command("rm")(rm_command)
tier_app.command("explain")(explain_command)
tier_app.command("verify")(verify_command)
tier_app.command("copy")(copy_command)
app.add_typer(tier_app, name="tier")
app.command("top")(top_command)
app.command("events")(engine.events_command)
app.command("set")(engine.set_command)
app.command("drain")(engine.drain_command)
app.command("resume")(engine.resume_command)
app.command("pin")(engine.pin_command)
app.command("prefetch")(engine.prefetch_command)
app.command("forget")(engine.forget_command)
app.add_typer(metrics_app, name="metrics")
app.command("backends")(backends_command)
app.command("new-backend")(new_backend_command)
app.command("conformance")(conformance_command)
app.command("replay")(replay_command)
app.command("plan")(plan_command)
app.command("bench")(bench_command)

#: The error for wrong arguments. Find it by name: newer releases of typer use their own click.
_WrongUsage: Any = next(
    base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException"
)
_TRACEBACK = "KVTIER_TRACEBACK"


def run() -> int:
    try:
        for tools in installed_engines().values():
            for name, command in tools.commands.items():
                app.command(name)(command)
        return app(standalone_mode=False) or 0
    except typer.Abort:
        _tell("Aborted!")
        return 1
    except _WrongUsage as error:
        written = io.StringIO()
        error.show(written)
        _tell(written.getvalue().rstrip())
        return 2
    except TierError as error:
        say(without_password(f"kvtier: {error}"), to_stderr=True)
        if advice := advice_on(error):
            _tell(f"  what to do: {advice}")
        return 1
    except KVTierError as error:
        _tell(f"kvtier: {error}")
        return 2
    except Exception as error:
        if os.environ.get(_TRACEBACK):
            _tell(traceback.format_exc())
        _tell(
            f"kvtier: unexpected {type(error).__name__}: {error}; set {_TRACEBACK}=1 in the "
            "environment to see a traceback"
        )
        return 3


def _tell(text: str) -> None:
    """Write lines to stderr, and mask passwords, because an error can quote a URL."""
    say(*without_password(text).split("\n"), to_stderr=True)
