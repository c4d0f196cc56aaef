"""Exceptions without secrets: an exception, and all that it was caused by."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Iterator
from typing import TypeAlias

from kvtier_sdk.errors import KVTierError
from kvtier_sdk.options.secrets import Secrets

#: Begins the note that stands for a traceback.
_TRACEBACK = "Traceback (most recent call last):\n"
#: Id of an exception to itself, which keeps the id its own, and to what stands for it.
_Shown: TypeAlias = dict[int, tuple[BaseException, BaseException]]


def masked_error(error: BaseException, secrets: Secrets) -> BaseException:
    """Hide secrets in an exception, its causes and contexts, and the members of groups.

    It is changed in place where that is enough. An exception that shows a secret all the same, as
    one that makes its text of other objects does, is replaced: by the nearest of the SDK's own
    classes, or by a class of the same name. Tracebacks are kept.

    Args:
        error: of any class.
        secrets: to hide.

    Returns:
        The exception, or its replacement.
    """
    shown: _Shown = {id(one): (one, _masked_alone(one, secrets)) for one in _reached(error)}
    originals = [one for one, _ in shown.values()]
    for one in originals:
        if isinstance(one, BaseExceptionGroup):
            _regroup(one, shown, secrets)
    for one in originals:
        # Read before they are written: the two may be one.
        cause, context, suppressed = one.__cause__, one.__context__, one.__suppress_context__
        replacement = shown[id(one)][1]
        replacement.__cause__ = cause and shown[id(cause)][1]
        replacement.__context__ = context and shown[id(context)][1]
        replacement.__suppress_context__ = suppressed
    return shown[id(error)][1]


def without_frames(error: BaseException) -> BaseException:
    """Replace the tracebacks of an exception, and of all that it was caused by, by their text.

    A frame has its local variables, such as a password that is being sent. Tools that report errors
    show them.

    Returns:
        The exception, with a note for its traceback.
    """
    for one in list(_reached(error)):
        if one.__traceback__ is not None:
            # A client may raise the same exception again and again.
            if not any(note.startswith(_TRACEBACK) for note in getattr(one, "__notes__", ())):
                text = "".join(traceback.format_tb(one.__traceback__))
                one.add_note(f"{_TRACEBACK}{text.rstrip()}")
            one.__traceback__ = None
    return error


def _reached(error: BaseException) -> Iterator[BaseException]:
    """An exception, its causes and contexts, and the members of groups."""
    seen: set[int] = set()
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if id(one) not in seen:
            seen.add(id(one))
            yield one
            waiting += filter(None, (one.__cause__, one.__context__))
            waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()


def _masked_alone(error: BaseException, secrets: Secrets) -> BaseException:
    """Mask an exception; not those that it leads to."""
    error.args = tuple(secrets.mask(arg) if isinstance(arg, str) else arg for arg in error.args)
    kept = vars(error)
    kept.update({name: secrets.mask(of) for name, of in kept.items() if isinstance(of, str)})
    notes = [secrets.mask(str(note)) for note in getattr(error, "__notes__", ())]
    if notes:
        error.__notes__ = notes
    # A group shows its members, whose turn comes.
    if isinstance(error, BaseExceptionGroup):
        return error
    try:
        text = str(error)
        if not secrets.are_in(f"{text}\n{error!r}"):
            return error
        text = secrets.mask(text)
    except Exception:  # a foreign class may raise anything when it is written out
        text = "its text cannot be shown"
    return _as(error, _replacement(error, text))


def _replacement(error: BaseException, text: str) -> BaseException:
    for base in type(error).__mro__:
        if issubclass(base, KVTierError) and base.__module__ == KVTierError.__module__:
            ours = base.__new__(base, text)
            vars(ours).update(vars(error))
            return ours
    names = {"__module__": type(error).__module__}
    foreign: type[Exception] = type(type(error).__name__, (Exception,), names)
    return foreign(text)


def _regroup(group: BaseExceptionGroup[BaseException], shown: _Shown, secrets: Secrets) -> None:
    """Replace a group if its text or one of its members cannot stay."""
    if shown[id(group)][1] is not group:
        return
    for member in group.exceptions:
        if isinstance(member, BaseExceptionGroup):
            _regroup(member, shown, secrets)
    members = [shown[id(member)][1] for member in group.exceptions]
    text = secrets.mask(group.message)
    if text != group.message or any(map(operator.is_not, members, group.exceptions)):
        shown[id(group)] = group, _as(group, BaseExceptionGroup(text, members))


def _as(error: BaseException, replacement: BaseException) -> BaseException:
    """Give a replacement the notes and the traceback of an exception."""
    for note in getattr(error, "__notes__", ()):
        replacement.add_note(note)
    return replacement.with_traceback(error.__traceback__)
