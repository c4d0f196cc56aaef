"""Exceptions without secrets."""

from __future__ import annotations

import traceback
from typing import Any

from kvtier_sdk.errors import KVTierError, chain_of
from kvtier_sdk.options.secrets import Secrets


def masked_error(error: BaseException, secrets: Secrets) -> BaseException:
    """Return an exception that shows no secret, and neither do its causes.

    Where one of them would, all are replaced: by the nearest of the SDK's own classes, or by a
    class of the same name. Tracebacks are kept.

    Args:
        error: of any class.
        secrets: to hide.

    Returns:
        The exception, or its replacement.
    """
    chain = chain_of(error)
    shown = "".join(line for one in chain for line in traceback.format_exception_only(one))
    if secrets.mask(shown) == shown:
        return error
    instead = {id(one): _replacement(one, secrets) for one in chain}
    instead[id(None)] = None
    for one in chain:
        replacement = instead[id(one)].with_traceback(one.__traceback__)
        replacement.__cause__ = instead[id(one.__cause__)]
        replacement.__context__ = instead[id(one.__context__)]
        replacement.__suppress_context__ = one.__suppress_context__
        # Only the replacement is raised, and a client may keep the original, frames and all.
        one.__traceback__ = None
    return instead[id(error)]  # type: ignore[no-any-return]


def _replacement(error: BaseException, secrets: Secrets) -> Any:
    """An exception of the same meaning, without causes."""
    text = secrets.mask(text_of_all(error))
    ours = [base for base in type(error).__mro__ if base.__module__ == KVTierError.__module__]
    if not ours:
        names = {"__module__": type(error).__module__}
        ours = [type(type(error).__name__, (Exception,), names)]
    replacement: Any = ours[0].__new__(ours[0], text)
    for name, value in vars(error).items():
        if isinstance(value, str | int | None):
            setattr(replacement, name, secrets.mask(value) if isinstance(value, str) else value)
    for note in getattr(error, "__notes__", ()):
        replacement.add_note(secrets.mask(str(note)))
    return replacement


def text_of_all(error: BaseException) -> str:
    """The text of an exception, and for a group those of its members."""
    if not isinstance(error, BaseExceptionGroup):
        return str(error)
    members = (f"{type(one).__name__}: {text_of_all(one)}" for one in error.exceptions)
    return f"{error}: {'; '.join(members)}"
