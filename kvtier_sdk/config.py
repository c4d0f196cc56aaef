"""Strict options: what a tier is configured with, as a dictionary or as a URL."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeVar, get_args
from urllib.parse import parse_qsl, unquote, urlsplit

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretBytes,
    SecretStr,
    ValidationError,
    model_validator,
)

from kvtier_sdk.errors import ConfigError
from kvtier_sdk.masking import (
    MASK,
    is_secret,
    masked,
    secrets_in,
    url_without_password,
    without_password,
)
from kvtier_sdk.units import Bytes, Count, Seconds


class StrictModel(BaseModel):
    """Options in which a misspelt name is an error. Build one with :func:`validate_options`.

    A quantity's option is written with its unit (``capacity: "4GiB"``), its attribute names the
    unit: declare ``capacity_bytes: Bytes = Field(alias="capacity")``.

    A secret is shown neither in a message nor by ``repr``: an option of type ``SecretStr``, and
    one whose name has a word such as ``password``, ``secret`` or ``token``.

    Attributes:
        needs: pairs of attributes; the first, when it is given, needs the second beside it.
        excludes: pairs of attributes that cannot be given together.
    """

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True)

    needs: ClassVar[Sequence[tuple[str, str]]] = ()
    excludes: ClassVar[Sequence[tuple[str, str]]] = ()

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        for name, needed in self.needs:
            if getattr(self, name) and not getattr(self, needed):
                one, other = self._option(name), self._option(needed)
                raise ValueError(f"option {one!r} is given without {other!r}")
        for name, excluded in self.excludes:
            if getattr(self, name) and getattr(self, excluded):
                one, other = self._option(name), self._option(excluded)
                raise ValueError(f"option {one!r} cannot be used beside {other!r}")
        return self

    @classmethod
    def _option(cls, name: str) -> str:
        return cls.model_fields[name].alias or name

    @classmethod
    def option_names(cls) -> list[str]:
        """The names under which options are given, in the order of their declaration."""
        return [cls._option(name) for name in cls.model_fields]

    @classmethod
    def secret_names(cls) -> set[str]:
        """The names of the options whose values are never shown."""
        return {
            name
            for name, field in zip(cls.option_names(), cls.model_fields.values(), strict=True)
            if is_secret(name) or _holds_secret(field.annotation)
        }

    def to_dict(self, *, secrets: bool = False, defaults: bool = False) -> dict[str, Any]:
        """The options that were given, as plain data that can be read again.

        Args:
            secrets: whether to give them away; else they are ``"***"``.
            defaults: whether to name those too that were not given.

        Returns:
            Option name to value, quantities in bytes and seconds.
        """
        given = self.model_dump(mode="json", by_alias=True, exclude_unset=not defaults)
        for option, name in zip(self.option_names(), type(self).model_fields, strict=True):
            value = getattr(self, name)
            if option not in given or value is None:
                continue
            if not secrets:
                hidden = option in self.secret_names()
                given[option] = MASK if hidden else masked(option, given[option])
            elif isinstance(value, SecretStr):
                given[option] = value.get_secret_value()
        return given

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        for name, value in super().__repr_args__():
            yield name, masked(name or "", value)


def _holds_secret(annotation: Any) -> bool:
    return annotation in (SecretStr, SecretBytes) or any(map(_holds_secret, get_args(annotation)))


@dataclass(frozen=True, slots=True)
class TierURL:
    """A tier's URL, taken apart: ``scheme://username:password@host:port/path?options``.

    Attributes:
        scheme: names the backend.
        host: or ``None``.
        port: or ``None``.
        username: percent-decoded, or ``None``.
        password: percent-decoded, or ``None``.
        path: percent-decoded; begins with ``/`` where there is a host.
        options: the query; every value is text.
    """

    scheme: str
    host: str | None
    port: int | None
    username: str | None
    password: str | None = field(repr=False)
    path: str
    options: Mapping[str, str]

    @classmethod
    def parse(cls, url: str) -> Self:
        """Take a URL apart.

        Args:
            url: for example ``file:///data/kv?capacity=1GiB``.

        Returns:
            Its parts.

        Raises:
            ConfigError: there is no scheme, the port is no number, there is a fragment, or an
                option has no '=' or is given twice.
        """
        shown = url_without_password(url)
        # The messages of urllib quote parts of the URL, be they a password.
        try:
            parts = urlsplit(url)
        except ValueError:
            raise ConfigError(f"tier URL {shown!r}: the host cannot be read") from None
        # First of all: what begins with it is taken from the host, the port or the query.
        if parts.fragment:
            raise ConfigError(f"tier URL {shown!r}: write '#' as %23, also in a password")
        try:
            port = parts.port
        except ValueError:
            raise ConfigError(
                f"tier URL {shown!r}: the port should be a number up to 65535; in a password "
                "write ':' as %3A, '/' as %2F, '?' as %3F, '@' as %40, '%' as %25"
            ) from None
        scheme = url.partition(":")[0] if ":" in url else ""
        if "_" in scheme and scheme.replace("_", "").isalnum():
            raise ConfigError(
                f"tier URL {shown!r}: a URL's scheme cannot hold '_'; "
                f"write '{scheme.replace('_', '-')}:'"
            )
        if not scheme or not parts.scheme:
            raise ConfigError(
                f"tier URL {shown!r} names no backend; write for example "
                "'file:///data/kv' or 'memory:'"
            )
        # Not by name: it may be the rest of a password.
        if parts.query and not all("=" in option for option in parts.query.split("&")):
            raise ConfigError(
                f"tier URL {shown!r}: an option has no '='; write '&' as %26, also in a password"
            )
        options: dict[str, str] = {}
        # A '+' is a blank in what a browser's form sends, and a '+' in a base64 key.
        for name, value in parse_qsl(parts.query.replace("+", "%2B"), keep_blank_values=True):
            if name in options:
                raise ConfigError(f"tier URL {shown!r}: option {name!r} is given twice")
            options[name] = value
        return cls(
            scheme=scheme,
            host=parts.hostname,
            port=port,
            username=unquote(parts.username) if parts.username is not None else None,
            password=unquote(parts.password) if parts.password is not None else None,
            path=unquote(parts.path),
            options=options,
        )

    def options_beside(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The query's options, and those that other parts of the URL stand for.

        Args:
            given: option name to value, ``None`` for what the URL does not say.

        Returns:
            Options, not yet validated.

        Raises:
            ConfigError: an option is in both.
        """
        options: dict[str, Any] = dict(self.options)
        for name, value in given.items():
            if value is None:
                continue
            if name in options:
                raise ConfigError(f"{self.scheme}: option {name!r} is given in the URL twice")
            options[name] = value
        return options


class TierConfig(StrictModel):
    """The base of every backend's options."""

    @classmethod
    def options_from_url(cls, url: TierURL) -> dict[str, Any]:
        """Turn a URL's parts into options of this model.

        The default takes the query and refuses a host or a path; a backend that gives them a
        meaning overrides it.

        Args:
            url: the parts.

        Returns:
            Options, not yet validated.

        Raises:
            ConfigError: a part has no meaning for this backend.
        """
        if url.host or url.path.strip("/"):
            raise ConfigError(
                f"{url.scheme}: takes no host and no path; write '{url.scheme}:?option=value'"
            )
        return dict(url.options)

    def location(self) -> str | None:
        """Where the chunks are kept, as a URL whose path leads there: ``file:///data/kv``.

        Tiers of one manager may not be inside each other's place, and two in one place must have
        the same options.

        Returns:
            The place, as every tier that shares it would write it; ``None``, the default, where
            a tier shares its place with none.
        """
        return None


class RunnerOptions(StrictModel):
    """Options that every tier has, whatever its backend: how the core treats it.

    Attributes:
        runner: what runs it: ``thread``, a thread of the engine's process; ``process``, a process
            of its own; ``auto`` takes a thread for a tier that keeps its chunks in this machine's
            memory, and a process for the others, if it can.
        store_policy: which chunks it is given, and when: ``through``, ``on_evict``,
            ``after_hits:2``, ``prompt_only``, or one that another package brings.
        offload_policy: ``chunk`` gives it what is new; ``request`` also the other chunks of each
            request, those that are in the primary tier already.
        lookup_deadline_s: a lookup that takes longer is a miss.
        load_deadline_s: a load that takes longer, queueing included, has failed.
        store_deadline_s: a store that takes longer, queueing included, has failed.
        retries: how often a retryable failure is tried again, inside the deadline.
        retry_delay_s: mean pause before the first retry; it doubles, and is jittered.
        concurrency: calls of ``load`` and ``store`` that run at once.
        max_batch_bytes: payload that one call carries at most (one chunk at the least).
        max_queue_bytes: payload that may be under way in each direction; stores beyond it are
            dropped, loads are misses.
        breaker_failures: calls in a row that fail before the tier is not asked any more, reads
            (lookups and loads) and writes counted apart.
        breaker_window: the same happens when half of the last so many calls went wrong.
        probe_interval_s: pause before a tier that is not asked is probed; it doubles with each
            probe that fails.
        max_probe_interval_s: the longest such pause.
    """

    runner: Literal["auto", "thread", "process"] = "auto"
    store_policy: str = "through"
    offload_policy: Literal["chunk", "request"] = "chunk"
    lookup_deadline_s: Seconds = Field(0.05, alias="lookup_deadline")
    load_deadline_s: Seconds = Field(5.0, alias="load_deadline")
    store_deadline_s: Seconds = Field(30.0, alias="store_deadline")
    retries: Count = Field(2, ge=0, le=100)
    retry_delay_s: Seconds = Field(0.02, alias="retry_delay")
    concurrency: Count = Field(8, ge=1, le=1024)
    max_batch_bytes: Bytes = Field(8 * 2**20, alias="max_batch", gt=0)
    max_queue_bytes: Bytes = Field(256 * 2**20, alias="max_queue", gt=0)
    breaker_failures: Count = Field(5, ge=1, le=10_000)
    breaker_window: Count = Field(20, ge=1, le=10_000)
    probe_interval_s: Seconds = Field(1.0, alias="probe_interval", gt=0)
    max_probe_interval_s: Seconds = Field(30.0, alias="max_probe_interval", gt=0)

    @model_validator(mode="after")
    def _check_probe_intervals(self) -> Self:
        if self.max_probe_interval_s < self.probe_interval_s:
            raise ValueError(
                f"option 'max_probe_interval' is {self.max_probe_interval_s:g} s but should be at "
                f"least 'probe_interval', which is {self.probe_interval_s:g} s"
            )
        return self


Model = TypeVar("Model", bound=StrictModel)

#: Faults that pydantic tells in words of Python.
_PLAIN = {"string_type": "text", "mapping_type": "a table", "dict_type": "a table"}
_KINDS: tuple[tuple[type, str], ...] = (
    (Mapping, "a table"),
    (list, "a list"),
    (str, "text"),
    (bool, "true or false"),
    (int, "a number"),
    (float, "a number"),
)


def validate_options(
    model: type[Model],
    options: Mapping[str, Any],
    *,
    where: str,
    path: str = "",
    also_known: Iterable[str] = (),
) -> Model:
    """Build a model from options, or say what is wrong with them.

    Args:
        model: the class to build.
        options: option name to value.
        where: what these options belong to, with which each complaint begins.
        path: of the options inside of that, ``tiers[1]``; empty at its root.
        also_known: names that are allowed beside the model's own, to be suggested too.

    Returns:
        The validated model.

    Raises:
        ConfigError: one line a fault: an unknown name with the closest known one, a missing
            option, a value of the wrong kind. Secrets are not in it.
    """
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        known = [*model.option_names(), *also_known]
        hidden = [
            secret
            for name, value in options.items()
            for secret in secrets_in("secret" if name in model.secret_names() else name, value)
        ]
        complaints = [
            f"{where}: {_complaint(dict(fault), path, known, model.secret_names(), hidden)}"
            for fault in error.errors()
        ]
        raise ConfigError("\n".join(complaints)) from None


def _complaint(
    fault: Mapping[str, Any], path: str, known: list[str], secret_names: set[str], hidden: list[str]
) -> str:
    loc = fault["loc"]
    option = f"option {option_path(path, *loc)!r}"
    if fault["type"] == "extra_forbidden":
        return f"unknown {option}; {nearest(str(loc[-1]), known, 'allowed')}"
    if fault["type"] == "missing":
        return f"{option} is missing"
    message = fault["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    if loc and (loc[0] in secret_names or any(is_secret(str(part)) for part in loc)):
        return f"{option} has a value that is not allowed; it is a secret and not shown"
    value = masked(str(loc[-1]), fault["input"]) if loc else None
    if fault["type"] != "value_error":
        message = _PLAIN.get(fault["type"], message)
        return f"{option} is {value!r} but should be {message}"
    # A rule's own words may quote any option, most often its own.
    if loc:
        message = message.replace(repr(fault["input"]), repr(value))
    for secret in sorted(hidden, key=len, reverse=True):
        message = message.replace(secret, MASK).replace(repr(secret)[1:-1], MASK)
    message = without_password(message)
    if loc:
        return f"{option}: {message}"
    # A rule about several options names them itself, without knowing where they stand.
    return message.replace("option '", f"option '{path}.") if path else message


def option_path(*parts: str | int) -> str:
    """The path of an option: ``tiers[1].capacity``.

    Args:
        parts: paths, names and indices, from the root; an empty one is left out.

    Returns:
        Them in one.
    """
    path = ""
    for part in parts:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part:
            path += f".{part}" if path else part
    return path


def kind_of(value: object) -> str:
    """What a value in a file is, for people: ``a list``."""
    if value is None:
        return "nothing"
    for kind, name in _KINDS:
        if isinstance(value, kind):
            return name
    return f"a {type(value).__name__}"


def nearest(word: str, known: Iterable[str], label: str) -> str:
    """Finish a complaint about an unknown word: what is known, and the closest of it.

    Args:
        word: what was written.
        known: what could have been written.
        label: what to call the known ones: "allowed", "installed".

    Returns:
        For example ``did you mean 'capacity'? allowed: capacity, root``.
    """
    names = sorted(known)
    listing = f"{label}: {', '.join(names) if names else 'none'}"
    close = closest(word, names)
    return f"did you mean {close!r}? {listing}" if close else listing


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that an unknown one is most like, if any is."""
    close = difflib.get_close_matches(word, sorted(known), n=1)
    return close[0] if close else None
