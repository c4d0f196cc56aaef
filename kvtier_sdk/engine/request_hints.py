"""Reads the hints that a client sends with a request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from math import inf
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kvtier_sdk.hints import DEFAULT_PRIORITY, Hint, Verb
from kvtier_sdk.options.place import nearest, one_line
from kvtier_sdk.options.units import Count, Flag, Seconds
from kvtier_sdk.types import RequestContext

#: The default duration of a pin: five minutes, as in the prompt caches of API providers.
_PIN_S = 300.0
_LONGEST_NAME = 256
_LONGEST_MISTAKE = 500
#: Limits the number of hints, because explaining their mistakes delays the engine's thread.
_MOST_HINTS = 16
#: Hints that a request may have several times, for example for different ranges of tokens.
_REPEATED = ("pin", "retain")
#: Advice by field, because pydantic's messages name internal types; "" means the whole table.
_TO_WRITE = {
    "": 'write a table such as {"session": "chat 7", "pin": "5m"}',
    "tokens": "write two numbers such as [0, 4096]",
    "prefetch": f"write true, or a session's name of at most {_LONGEST_NAME} characters",
}


def _as_leases(value: Any) -> Any:
    """Read ``true`` and ``"5m"`` as a lease of the whole request."""
    if value is None or value is False:
        return []
    if isinstance(value, list) and len(value) > _MOST_HINTS:
        raise ValueError(f"{len(value):,} of them; the most is {_MOST_HINTS}")
    return [
        one if isinstance(one, Mapping) else {} if one is True else {"for": one}
        for one in _listed(value)
    ]


_Name = Annotated[str, Field(min_length=1, max_length=_LONGEST_NAME)]
_Priority = Annotated[Count, Field(ge=0, le=100)]


# Do not use StrictModel, which would read files and environment variables that a client names.
class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, table: Any) -> Any:
        if isinstance(table, Mapping) and len(table) > _MOST_HINTS:
            raise ValueError(f"{len(table):,} entries; the most is {_MOST_HINTS}")
        return table


class _Lease(_Model):
    duration_s: Seconds = Field(_PIN_S, alias="for")
    tokens: tuple[Count, Count] | None = None
    priority: _Priority | None = None


_LEASE_FIELDS = [field.alias or name for name, field in _Lease.model_fields.items()]
_Leases = Annotated[list[_Lease], BeforeValidator(_as_leases)]


class _Hints(_Model):
    session: _Name | None = None
    tenant: str = Field("", max_length=_LONGEST_NAME)
    priority: _Priority = DEFAULT_PRIORITY
    pin: _Leases = []
    retain: _Leases = []
    resume_in: Seconds | None = None
    prefetch: Flag | _Name = False
    demote: Flag = False
    end: Flag = False

    def as_hints(self) -> tuple[Hint, ...]:
        hints = [
            Hint(verb, lease.duration_s, lease.tokens, lease.priority)
            # Add pins last, because a newer lease of a chunk replaces an older one.
            for verb, leases in ((Verb.RETAIN, self.retain), (Verb.PIN, self.pin))
            for lease in leases
        ]
        if self.resume_in is not None:
            hints.append(Hint(Verb.RESUME_IN))
        if self.prefetch:
            named = self.prefetch if isinstance(self.prefetch, str) else None
            hints.append(Hint(Verb.PREFETCH, session=named))
        if self.demote:
            hints.append(Hint(Verb.DEMOTE))
        if self.end:
            hints.append(Hint(Verb.END))
        return tuple(hints)


def read_request(
    request_id: str,
    params: Mapping[str, Any] | None,
    actions: Iterable[tuple[str, Mapping[str, Any]]] = (),
) -> RequestContext:
    """Build a request's context from its client's parameters. Wrong parameters raise no error.

    If a hint cannot be read, all hints are ignored, and the manager's receipt has the reason.

    >>> read_request("r1", {"kvtier": {"session": "chat 7", "pin": "5m"}}).session
    'chat 7'

    Args:
        request_id: the engine's id of the request.
        params: the client's parameters, whose entry ``kvtier`` is a table of hints.
        actions: names and payloads of at most 64 further hints, such as the actions of vLLM's
            ``kv_hints``. A payload may have a ``session`` and a ``tenant`` beside the hint's own
            fields. The field ``value`` contains a hint that is not a table, such as ``resume_in``.
    """
    params = params or {}
    try:
        hints = _Hints.model_validate(_joined(params.get("kvtier"), actions))
    except ValidationError as error:
        mistake = Hint(Verb.UNKNOWN, mistake=_in_words(error))
        return RequestContext(request_id, params, hints=(mistake,))
    is_last = hints.demote or hints.end
    return RequestContext(
        request_id,
        params,
        resume_in_s=inf if is_last else hints.resume_in,
        session=hints.session,
        tenant=hints.tenant,
        priority=hints.priority,
        hints=hints.as_hints(),
        is_over=hints.end,
    )


def _joined(table: object, actions: Iterable[tuple[str, Mapping[str, Any]]]) -> object:
    if table is None:
        table = {}
    if not isinstance(table, Mapping):
        return table
    joined = dict(table)
    for name, payload in islice(actions, 4 * _MOST_HINTS):
        own = dict(payload)
        joined |= {key: own.pop(key) for key in ("session", "tenant") if key in own}
        hint = own.get("value", own) if own else True
        if name in joined and name in _REPEATED:
            hint = [*_listed(joined[name]), *_listed(hint)]
        joined[name] = hint
    return joined


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _in_words(error: ValidationError) -> str:
    # Drop repetitions, because pydantic reports an error for each type of a union (``prefetch``).
    parts: dict[str, None] = {}
    for detail in error.errors(include_url=False, include_input=False):
        names = [str(part)[:_LONGEST_NAME] for part in detail["loc"]]
        what = detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "extra_forbidden":
            fields = _Hints.model_fields if len(names) == 1 else _LEASE_FIELDS
            what = nearest(names[-1], fields, "allowed")
        else:
            for place, name in enumerate(names or [""]):
                if name in _TO_WRITE:
                    names, what = names[: place + 1], _TO_WRITE[name]
                    break
        parts[f"{'.'.join(names) or 'kvtier'}: {what}"] = None
    return one_line("; ".join(parts))[:_LONGEST_MISTAKE]
