"""The namespaces of a tier that a command works on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from kvtier_sdk.cli.flags import read_flag
from kvtier_sdk.cli.tier.faults import CannotListError
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.namespace import Namespace, StoredNamespace
from kvtier_sdk.opening.maintenance import open_for_maintenance
from kvtier_sdk.options.files import read_options
from kvtier_sdk.options.place import one_line
from kvtier_sdk.options.units import parse_seconds
from kvtier_sdk.types import Capability

NamespaceOption = Annotated[
    str | None,
    typer.Option(
        "--namespace",
        metavar="NAMESPACE",
        help="Only this namespace: the beginning of its fingerprint, or a JSON file with its facts "
        "(a manifest.json).",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="TEXT",
        help="Only namespaces with this in a model's name, by a manifest that fits its namespace.",
    ),
]
TimeoutOption = Annotated[
    str, typer.Option("--timeout", metavar="DURATION", help="Time limit of each call of a tier.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout instead of the text.")
]

#: Any namespace will do to open a tier only to list its namespaces.
_NO_NAMESPACE = Namespace({"engine": "kvtier tier"})
#: Digits of a fingerprint that are shown: enough to tell namespaces apart.
SHOWN_DIGITS = 12


@dataclass(frozen=True, slots=True)
class Selection:
    """An operator's choice of namespaces.

    Attributes:
        digits: the beginning of the fingerprint.
        model: a part of the model's name.
        given: the namespace whose facts the operator gives.
    """

    digits: str = ""
    model: str = ""
    given: Namespace | None = None

    @classmethod
    def read(cls, namespace: str | None, model: str | None = None) -> Selection:
        """Read the options ``--namespace`` and ``--model``.

        Raises:
            ConfigError: ``namespace`` is neither a file with facts nor a part of a fingerprint.
        """
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

    @property
    def is_everything(self) -> bool:
        """True if no namespace is left out."""
        return self == Selection()

    def of(self, spec: TierSpec, timeout_s: float) -> list[Namespace]:
        """Find the selected namespaces in a tier.

        Raises:
            CannotListError: the backend cannot list its namespaces, and no namespace is given.
            TierError: the tier cannot be read.
        """
        if Capability.NAMESPACES not in spec.tier_class.capabilities:
            if self.given is None:
                raise CannotListError(
                    f"tier {spec.name!r}: backend {spec.backend!r} cannot list its namespaces; "
                    "name one with --namespace FACTS.json"
                )
            return [in_tier(spec, self.given)]
        found = [one for one in stored_namespaces(spec, timeout_s) if self._means(spec, one)]
        # The given facts may say more than a manifest, which hides secrets.
        return [in_tier(spec, self.given)] if found and self.given is not None else [*found]

    def _means(self, spec: TierSpec, found: StoredNamespace) -> bool:
        if self.given is not None and in_tier(spec, self.given) != found:
            return False
        if self.model.lower() not in str(found.facts.get("model", "")).lower():
            return False
        return found.fingerprint.startswith(self.digits)


def stored_namespaces(spec: TierSpec, timeout_s: float) -> list[StoredNamespace]:
    """List a tier's namespaces in the order of their models; its backend must be able to.

    Raises:
        ConfigError: an option is wrong.
        TierError: the tier cannot be read.
    """
    with open_for_maintenance(spec, _NO_NAMESPACE, timeout_s=timeout_s) as tier:
        found = list(tier.namespaces())
    return sorted(found, key=lambda one: (model_of(one), one.fingerprint))


def in_tier(spec: TierSpec, namespace: Namespace) -> Namespace:
    """Return a namespace as a tier stores it: sealed, if the tier has a codec."""
    if spec.runner.codec is None:
        return namespace
    return namespace.sealed_by(spec.runner.codec.partition(":")[0])


def read_timeout(text: str) -> float:
    """Read the option ``--timeout``."""
    return read_duration("--timeout", text)


def read_duration(flag: str, text: str) -> float:
    """Read an option as a duration above 0."""
    duration_s = read_flag(flag, parse_seconds, text)
    if not duration_s:
        raise ConfigError(f"{flag} should be more than 0")
    return duration_s


def _read_facts(path: Path) -> Namespace:
    options = read_options(path)
    facts, fingerprint = options.get("facts"), options.get("fingerprint")
    if isinstance(facts, dict) and isinstance(fingerprint, str):
        return StoredNamespace(facts, fingerprint)
    return Namespace(options)


def model_of(namespace: Namespace) -> str:
    """Name a namespace's model, or say why it is not known."""
    fault = namespace.fault if isinstance(namespace, StoredNamespace) else ""
    return one_line(str(namespace.facts.get("model", fault or "-")))


def named(namespace: Namespace) -> str:
    """Name a namespace in a sentence: its fingerprint and its model."""
    model = model_of(namespace)
    digits = namespace.fingerprint[:SHOWN_DIGITS]
    return digits if model == "-" else f"{digits} ({model})"
