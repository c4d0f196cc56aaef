"""``kvtier tier explain``: explains why chunks are found or not."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from importlib import import_module
from itertools import groupby, product, takewhile, zip_longest
from pathlib import Path
from typing import Annotated, Any

import typer

from kvtier_sdk.cli.engine import ask_engine, sockets_of
from kvtier_sdk.cli.targets import TARGET, TARGET_HELP, prompt_keys, read_target
from kvtier_sdk.cli.terminal import JsonOption, print_columns, say
from kvtier_sdk.cli.tier.contents import Contents
from kvtier_sdk.cli.tier.maintenance import open_for_maintenance
from kvtier_sdk.cli.tier.options import NamespaceOption, TimeoutOption, read_timeout
from kvtier_sdk.cli.tier.selection import Faults, Selection, named, stored_namespaces
from kvtier_sdk.cli.tier.verify import check_readable
from kvtier_sdk.config.tier_spec import TierSpec
from kvtier_sdk.config.tiering_config import TieringConfig
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.namespace import Namespace
from kvtier_sdk.options.place import brief, one_line
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.runner.jobs import Verdict
from kvtier_sdk.tiering.tier_record import NO_RECORD, Loss
from kvtier_sdk.types import Capability, OffloadKey

_STATES = {
    Verdict.OK: "present",
    Verdict.NOT_FOUND: "absent",
    Verdict.CORRUPT: "damaged",
    Verdict.AUTH: "sealed otherwise",
}
_HINTS = {
    "hash_seed": "the engines seed their prefix hashes differently: give them one PYTHONHASHSEED",
    "engine": "the engines are of different releases",
    "compress": "one engine has a tier with compress=fp8, and the other has none",
}


def explain_command(
    tiers: Annotated[str, typer.Argument(metavar=TARGET, help=TARGET_HELP)],
    namespace: NamespaceOption = None,
    keys: Annotated[
        list[OffloadKey] | None,
        typer.Option(
            "--key", metavar="HEX", parser=bytes.fromhex, help="A chunk's key; repeat it for more."
        ),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A prompt's token ids: a JSON list, or the answer of vLLM's /tokenize. Its chunks "
            "get their keys as in vLLM, without vLLM, for a request without an adapter, images or "
            "sounds.",
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A prompt's text; --tokenizer makes tokens of it."),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The model's directory, or its tokenizer.json."),
    ] = None,
    salt: Annotated[
        str | None, typer.Option(metavar="TEXT", help="The request's 'cache_salt'.")
    ] = None,
    timeout: TimeoutOption = "60s",
    as_json: JsonOption = False,
) -> None:
    """Explain why chunks are found or not: which are present, absent or damaged in each tier.

    The engines at the configuration's admin_socket say why a chunk is absent. Each tier's most
    similar other namespace is shown with the differing facts. Nothing is changed. For example

        kvtier tier explain kv.toml --namespace 3f9a --tokens prompt.json

    The exit status is 1 if a tier could not be read.
    """
    if bool(keys) + (tokens is not None) + (text is not None) > 1:
        raise ConfigError("--key, --tokens and --text: give one of them")
    prompt = None if tokens is None else _read_tokens(tokens)
    if text is not None:
        prompt = _encode(text, tokenizer)
    elif tokenizer is not None:
        raise ConfigError("--tokenizer goes with --text")
    if salt is not None and prompt is None:
        raise ConfigError("--salt goes with --tokens or --text")
    target, timeout_s = read_target(tiers), read_timeout(timeout)
    selection, faults = Selection.read(namespace), Faults(target)
    held: dict[str, list[Contents]] = {}
    for spec in target.config.tiers:
        if Capability.NAMESPACES in spec.tier_class.capabilities:
            with faults.of(spec):
                held[spec.name] = [
                    Contents.of(spec, one, timeout_s) for one in stored_namespaces(spec, timeout_s)
                ]
    if selection.given is None and not held and faults.by_tier:
        faults.show(*target.config.tiers)
        faults.end()
    meant = _meant(selection, [one for found in held.values() for one in found])
    groups = [keys] if keys else []
    if prompt is not None:
        groups += prompt_keys(prompt, meant.facts, salt)
    answers = []
    for spec in target.config.tiers:
        if spec.name not in faults.by_tier:
            with faults.of(spec):
                answers.append(_ask(spec, meant, held.get(spec.name), groups, timeout_s))
    _ask_engines(target.config, meant, answers)
    if as_json:
        print(json.dumps(_as_json(meant, answers, groups, faults)))
    else:
        _show(meant, answers, groups, [] if prompt is None else meant.tokens_per_chunk)
        faults.show(*target.config.tiers)
    faults.end()


@dataclass(slots=True)
class _Answer:
    spec: TierSpec
    contents: Contents | None = None
    is_there: bool | None = None
    nearest: Contents | None = None
    differences: dict[str, tuple[object, object]] = field(default_factory=dict)
    states: list[list[str]] = field(default_factory=list)
    absent: list[OffloadKey] = field(default_factory=list)
    losses: dict[OffloadKey, Loss] = field(default_factory=dict)

    def in_words(self, key: OffloadKey, state: str) -> str:
        if key not in self.losses:
            return state
        reason, lost_s = self.losses[key]
        return f"{reason} {datetime.fromtimestamp(lost_s):%m-%d %H:%M}"


def _meant(selection: Selection, held: Sequence[Contents]) -> Namespace:
    """Return the selected namespace; raise :class:`ConfigError` unless there is exactly one."""
    if selection.given is not None:
        return selection.given
    # If no digits are given, skip empty namespaces, which would make the choice ambiguous.
    offered = [one.namespace for one in held if one.chunks or selection.digits]
    digits = selection.digits
    found = {one.fingerprint: one for one in offered if one.fingerprint.startswith(digits)}
    if len(found) == 1:
        return next(iter(found.values()))
    if not found:
        what = f"that begins with {selection.digits!r}" if selection.digits else "in these tiers"
        raise ConfigError(
            f"there is no namespace {what}; 'kvtier tier ls --all' lists them, and --namespace "
            "FACTS.json gives one by hand"
        )
    names = ", ".join(named(one) for one in found.values())
    raise ConfigError(f"{len(found)} namespaces are there; name one with --namespace: {names}")


def _ask(
    spec: TierSpec,
    meant: Namespace,
    held: Sequence[Contents] | None,
    groups: Sequence[Sequence[OffloadKey]],
    timeout_s: float,
) -> _Answer:
    answer = _Answer(spec)
    here = spec.in_tier(meant)
    if held is not None:
        answer.contents = next((one for one in held if one.namespace == here), None)
        answer.is_there = answer.contents is not None
        others = [
            (one, here.differences(one.namespace.facts))
            for one in held
            if one.namespace != here and one.chunks and one.namespace.facts
        ]
        if others:
            # Another model's namespace is the least similar, because its chunks can never be used.
            nearest = min(others, key=lambda other: ("model" in other[1], len(other[1])))
            answer.nearest, answer.differences = nearest[0], dict(_leaves(nearest[1]))
    if groups:
        check_readable(spec, here)
        with open_for_maintenance(spec, here, timeout_s=timeout_s) as tier:
            for keys in groups:
                states = [_STATES.get(one, "unreadable") for one in tier.examine(keys)]
                answer.states.append(states)
                found = zip(keys, states, strict=True)
                answer.absent += [key for key, state in found if state == "absent"]
    return answer


def _ask_engines(config: TieringConfig, meant: Namespace, answers: Sequence[_Answer]) -> None:
    """Ask running engines why chunks are absent, and add the reasons to ``answers``."""
    asked = [answer for answer in answers if answer.absent]
    for socket, answer in product(sockets_of(config), asked):
        name, fingerprint = answer.spec.name, answer.spec.in_tier(meant).fingerprint
        keys = [key.hex() for key in answer.absent]
        # Ignore engines that have ended, and engines without this tier.
        with suppress(typer.Exit, ConfigError):
            told = ask_engine(socket, command="losses", tier=name, namespace=fingerprint, keys=keys)
            for key, loss in zip(answer.absent, told["losses"], strict=True):
                if loss and (key not in answer.losses or loss[0] != NO_RECORD):
                    answer.losses[key] = loss


def _leaves(
    differences: Mapping[str, tuple[object, object]],
) -> Iterator[tuple[str, tuple[object, object]]]:
    """Yield each differing value with its path inside tables and lists."""
    for name, (ours, theirs) in differences.items():
        if isinstance(ours, dict) and isinstance(theirs, dict):
            names = sorted(ours.keys() | theirs.keys())
            inner = {f"{name}.{key}": (ours.get(key), theirs.get(key)) for key in names}
        elif isinstance(ours, list) and isinstance(theirs, list):
            pairs = enumerate(zip_longest(ours, theirs))
            inner = {f"{name}[{index}]": pair for index, pair in pairs}
        else:
            yield name, (ours, theirs)
            continue
        yield from _leaves({key: pair for key, pair in inner.items() if pair[0] != pair[1]})


def _show(
    meant: Namespace,
    answers: Sequence[_Answer],
    groups: Sequence[Sequence[OffloadKey]],
    tokens_per_chunk: list[int],
) -> None:
    say(f"namespace {named(meant)}")
    for answer in answers:
        say(f"tier {answer.spec.name!r}: {_presence(answer)}")
        # Another namespace explains absent chunks only if this namespace has no chunks at all.
        is_asked_for = not groups or not (answer.contents and answer.contents.chunks)
        if answer.nearest is not None and is_asked_for:
            other = answer.nearest
            say(f"  nearest other: {named(other.namespace)}, {other.chunks:,} chunks; it has")
            for name, pair in answer.differences.items():
                ours, theirs = (brief(json.dumps(value)) for value in pair)
                say(f"    {name} {theirs} instead of {ours}")
                if name in _HINTS:
                    say(f"      {_HINTS[name]}")
    tiers = [answer.spec.name.upper() for answer in answers]
    for index, keys in enumerate(groups if answers else ()):
        states = [map(answer.in_words, keys, answer.states[index]) for answer in answers]
        by_chunk = list(zip(*states, strict=True))
        say("")
        if index < len(tokens_per_chunk):
            _show_runs(index, by_chunk, tiers, tokens_per_chunk[index])
        else:
            by_key = zip(keys, by_chunk, strict=True)
            print_columns([("KEY", *tiers), *((key.hex(), *state) for key, state in by_key)])


def _presence(answer: _Answer) -> str:
    if answer.is_there is None:
        return "it cannot list its namespaces"
    if answer.contents is None:
        return "the namespace is not there"
    return f"{answer.contents.chunks:,} chunks, {format_bytes(answer.contents.used_bytes)}"


def _show_runs(
    group: int, by_chunk: Sequence[Sequence[str]], tiers: Sequence[str], tokens_per_chunk: int
) -> None:
    found = sum(1 for _ in takewhile(lambda states: "present" in states, by_chunk))
    say(
        f"prompt, group {group}: {len(by_chunk):,} chunks of {tokens_per_chunk} tokens; "
        f"an engine gets the first {found:,} ({found * tokens_per_chunk:,} tokens)"
    )
    rows = [("CHUNKS", "TOKENS", *tiers)]
    for state, run in groupby(range(len(by_chunk)), by_chunk.__getitem__):
        first, *rest = run
        last = rest[-1] if rest else first
        chunks = f"{first}-{last}" if rest else f"{first}"
        tokens = f"{first * tokens_per_chunk}-{(last + 1) * tokens_per_chunk - 1}"
        rows.append((chunks, tokens, *state))
    if by_chunk:
        print_columns(rows)


def _as_json(
    meant: Namespace,
    answers: Sequence[_Answer],
    groups: Sequence[Sequence[OffloadKey]],
    faults: Faults,
) -> dict[str, Any]:
    return {
        "ok": not faults.by_tier,
        "namespace": {"fingerprint": meant.fingerprint, "facts": meant.manifest},
        "keys": [[key.hex() for key in keys] for keys in groups],
        "tiers": [
            {
                "name": answer.spec.name,
                "backend": answer.spec.backend,
                "is_there": answer.is_there,
                "contents": answer.contents and answer.contents.as_json(),
                "nearest": answer.nearest and answer.nearest.as_json(),
                "differences": {
                    name: {"ours": ours, "theirs": theirs}
                    for name, (ours, theirs) in answer.differences.items()
                },
                "states": answer.states,
                "losses": {key.hex(): loss for key, loss in answer.losses.items()},
            }
            for answer in answers
        ],
        "faults": faults.by_tier,
    }


def _read_tokens(path: Path) -> list[int]:
    try:
        found = json.loads(path.read_text())
        tokens = list(found["tokens"] if isinstance(found, dict) else found)
    except (OSError, ValueError, LookupError, TypeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it holds no list of numbers"
        raise ConfigError(f"--tokens {path}: {reason}") from None
    if any(type(token) is not int for token in tokens):
        raise ConfigError("--tokens: token ids are whole numbers")
    return tokens


def _encode(text: Path, tokenizer: Path | None) -> list[int]:
    if tokenizer is None:
        raise ConfigError("--text needs --tokenizer, with the model's directory")
    try:
        library = import_module("tokenizers")
    except ModuleNotFoundError:
        raise ConfigError("--text needs the model's tokenizer: pip install tokenizers") from None
    try:
        prompt = text.read_text()
        file = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
        return list(library.Tokenizer.from_str(file.read_text()).encode(prompt).ids)
    except Exception as error:  # the library raises plain exceptions
        raise ConfigError(
            f"--text {text}, --tokenizer {tokenizer}: {one_line(str(error))}"
        ) from None
