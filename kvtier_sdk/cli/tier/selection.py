"""Selects namespaces, and collects the errors of tiers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import typer

from kvtier_sdk.cli.targets import Target
from kvtier_sdk.cli.terminal import say
from kvtier_sdk.cli.tier.maintenance import open_for_maintenance
from kvtier_sdk.cli.tier_check import advice_on
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import BackendError, ConfigError, TierError
from kvtier_sdk.namespace import Namespace, StoredNamespace
from kvtier_sdk.options.files import read_options
from kvtier_sdk.options.model import secrets_of
from kvtier_sdk.options.place import one_line
from kvtier_sdk.types import Capability

#: The number of shown digits of a fingerprint, enough to distinguish namespaces.
SHOWN_DIGITS = 12


class CannotListError(ConfigError):
    """The backend cannot list its namespaces, and the operator has not named a namespace."""


@dataclass(frozen=True, slots=True)
class Selection:
    """The namespaces that an operator selects, by fingerprint, by model name, or by all facts."""

    digits: str = ""
    model: str = ""
    given: Namespace | None = None

    @classmethod
    def read(cls, namespace: str | None, model: str | None = None) -> Selection:
        if namespace is None:
            return cls(model=model or "")
        if Path(namespace).suffix:
            return cls(model=model or "", given=_read_facts(Path(namespace)))
        if not namespace or set(namespace) - set("0123456789abcdef"):
            raise ConfigError(
                f"--namespace {namespace!r}: neither the beginning of a fingerprint, as "
                "'kvtier tier ls' shows it, nor a JSON file with a namespace's facts"
            )
        return cls(namespace, model or "")

    def of(self, spec: TierSpec, timeout_s: float) -> list[Namespace]:
        if Capability.NAMESPACES not in spec.tier_class.capabilities:
            if self.given is None:
                raise CannotListError(
                    f"tier {spec.name!r}: backend {spec.backend!r} cannot list its namespaces; "
                    "name one with --namespace FACTS.json"
                )
            return [spec.in_tier(self.given)]
        given = None if self.given is None else spec.in_tier(self.given)
        found = [
            one
            for one in stored_namespaces(spec, timeout_s)
            if given in (None, one)
            and self.model.lower() in str(one.facts.get("model", "")).lower()
            and one.fingerprint.startswith(self.digits)
        ]
        # Prefer the operator's facts, because a manifest hides secrets.
        return [given] if found and given is not None else [*found]


def stored_namespaces(spec: TierSpec, timeout_s: float) -> list[StoredNamespace]:
    with open_for_maintenance(spec, timeout_s=timeout_s) as tier:
        found = list(tier.namespaces())
    return sorted(found, key=lambda one: (model_of(one), one.fingerprint))


def _read_facts(path: Path) -> Namespace:
    options = read_options(path)
    facts, fingerprint = options.get("facts"), options.get("fingerprint")
    if isinstance(facts, dict) and isinstance(fingerprint, str):
        return StoredNamespace(facts, fingerprint)
    return Namespace(options)


def model_of(namespace: Namespace) -> str:
    """Return the name of a namespace's model, or the reason why it is unknown."""
    fault = namespace.fault if isinstance(namespace, StoredNamespace) else ""
    return one_line(str(namespace.facts.get("model", fault or "-")))


def named(namespace: Namespace) -> str:
    model = model_of(namespace)
    digits = namespace.fingerprint[:SHOWN_DIGITS]
    return digits if model == "-" else f"{digits} ({model})"


class Faults:
    """The errors of tiers and their namespaces, with secrets masked."""

    def __init__(self, target: Target) -> None:
        # ``by_tier`` has the errors, and ``notes`` the reasons for skipping one of several tiers.
        self.by_tier: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self._is_one_of_several = len(target.config.tiers) > 1
        self._advice: dict[str, str] = {}

    @contextmanager
    def of(self, spec: TierSpec) -> Iterator[None]:
        """Suppress an error in the ``with`` block, and add it to the tier's errors."""
        try:
            yield
        except (BackendError, ConfigError, TierError) as error:
            if isinstance(error, CannotListError) and self._is_one_of_several:
                self.notes[spec.name] = str(error)
                return
            fault, known = secrets_of(spec.config).mask(str(error)), self.by_tier.get(spec.name)
            self.by_tier[spec.name] = fault if known in (None, fault) else f"{known}; {fault}"
            if advice := advice_on(error):
                self._advice[spec.name] = advice

    def show(self, *specs: TierSpec) -> None:
        for name in (spec.name for spec in specs):
            if name in self.notes:
                say(f"skipped: {self.notes[name]}")
            if name in self.by_tier:
                say(f"FAILED: {self.by_tier[name]}")
                if advice := self._advice.get(name):
                    say(f"  what to do: {advice}")

    def end(self) -> None:
        if self.by_tier:
            raise typer.Exit(1)
