"""``kvtier tier``: one module per command. Engines may use the tiers at the same time."""

from __future__ import annotations

import typer

from kvtier_sdk.cli.tier.copy import copy_command
from kvtier_sdk.cli.tier.du import du_command
from kvtier_sdk.cli.tier.explain import explain_command
from kvtier_sdk.cli.tier.ls import ls_command
from kvtier_sdk.cli.tier.rm import rm_command
from kvtier_sdk.cli.tier.verify import verify_command

tier_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Look into tiers, and keep them in order, beside the engines that use them.",
)
tier_app.command("ls")(ls_command)
tier_app.command("du")(du_command)
tier_app.command("rm")(rm_command)
tier_app.command("explain")(explain_command)
tier_app.command("verify")(verify_command)
tier_app.command("copy")(copy_command)
