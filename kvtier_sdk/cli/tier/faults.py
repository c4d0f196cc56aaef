"""Faults of single tiers: the command goes on with the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from kvtier_sdk.cli.say import say
from kvtier_sdk.cli.targets import Target
from kvtier_sdk.cli.tier_check import advice_on
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import BackendError, ConfigError, TierError
from kvtier_sdk.options.model import secrets_of
from kvtier_sdk.runner.jobs import verdict_of


class CannotListError(ConfigError):
    """A backend cannot list its namespaces, and no namespace is given."""


class Faults:
    """The faults of tiers, and of namespaces in them, without secrets.

    Attributes:
        by_tier: by tier name, the reason why the tier could not be read or changed.
        notes: by tier name, the reason why the tier was skipped; with other tiers, not a fault.
    """

    def __init__(self, target: Target) -> None:
        self.by_tier: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self._is_one_of_several = len(target.tiers) > 1
        self._advice: dict[str, str | None] = {}

    @contextmanager
    def of(self, spec: TierSpec) -> Iterator[None]:
        """Record the error of a tier or a namespace that ends the block, after earlier errors."""
        try:
            yield
        except (BackendError, ConfigError, TierError) as error:
            if isinstance(error, CannotListError) and self._is_one_of_several:
                self.notes[spec.name] = str(error)
                return
            fault, known = secrets_of(spec.config).mask(str(error)), self.by_tier.get(spec.name)
            self.by_tier[spec.name] = fault if known in (None, fault) else f"{known}; {fault}"
            if isinstance(error, TierError):
                self._advice[spec.name] = advice_on(verdict_of(error))

    def show(self, spec: TierSpec) -> None:
        """Print a tier's fault or note, if it has one."""
        if spec.name in self.notes:
            say(f"passed over: {self.notes[spec.name]}")
        if spec.name in self.by_tier:
            say(f"FAILED: {self.by_tier[spec.name]}")
            if advice := self._advice.get(spec.name):
                say(f"  what to do: {advice}")

    def end(self) -> None:
        """End the command with status 1 if a tier has a fault."""
        if self.by_tier:
            raise typer.Exit(1)
