"""Exceptions without secrets."""

from __future__ import annotations

import traceback
from typing import Any, cast

from kvtier_sdk.errors import KVTierError, chain_of
from kvtier_sdk.options.secrets import Secrets


def masked_error(error: BaseException, secrets: Secrets) -> BaseException:
    """Return an exception that shows no secret, and neither do its causes.

    Where it would show one, it is replaced: by the nearest of the SDK's own classes, or by a class
    of the same name. Its traceback and its causes are in a note, without secrets.

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
    note = secrets.mask("".join(traceback.format_exception(error)))
    for one in chain:
        # The caller raises the replacement only, and frames hold the buffers of the call.
        one.__traceback__ = None
    text = secrets.mask(str(error))
    ours = [base for base in type(error).__mro__ if base.__module__ == KVTierError.__module__]
    if not ours:
        names = {"__module__": type(error).__module__}
        ours = [type(type(error).__name__, (Exception,), names)]
    replacement: Any = ours[0].__new__(ours[0], text)
    for name, value in vars(error).items():
        if isinstance(value, str | int | None):
            setattr(replacement, name, secrets.mask(value) if isinstance(value, str) else value)
    replacement.add_note(note)
    return cast(BaseException, replacement)
