"""Every error that the SDK raises or that a backend may raise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar


class KVTierError(Exception):
    """The root of the tree."""


class ConfigError(KVTierError, ValueError):
    """A setting is wrong; the message says which, and what to write instead."""


class ReplayError(KVTierError):
    """A workload cannot be played: its file is missing or malformed, or its geometry is too big."""


class BackendError(KVTierError):
    """A backend cannot be found or loaded."""


class UnknownBackendError(BackendError):
    """No installed package offers a backend of that name."""


class DuplicateBackendError(BackendError):
    """Two installed packages offer a backend of one name."""


class BackendLoadError(BackendError):
    """A backend was found but could not be imported, or is not a tier of this contract."""


class TierError(KVTierError):
    """An operation of a tier failed.

    Args:
        message: what happened, in words that an operator understands.
        retryable: whether the same call may succeed in a moment; ``None`` takes the class's
            :attr:`default_retryable`.

    Attributes:
        tier: name of the tier, filled in by the runner.
        operation: ``"lookup"``, ``"load"``, ..., filled in by the runner.
    """

    default_retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, retryable: bool | None = None) -> None:
        super().__init__(message)
        self.retryable: bool = self.default_retryable if retryable is None else retryable
        self.tier: str | None = None
        self.operation: str | None = None

    def __str__(self) -> str:
        where = " ".join(part for part in (self.tier, self.operation) if part)
        return f"{where}: {self.args[0]}" if where else str(self.args[0])


class ChunkNotFoundError(TierError):
    """The chunk is not there (any more): a miss."""


class CorruptChunkError(TierError):
    """What is stored under the key is not this chunk: truncated, flipped, misplaced, foreign."""


class TierUnavailableError(TierError):
    """The tier cannot be reached. Never answer ``False`` from ``lookup`` instead."""

    default_retryable = True


class TierTimeoutError(TierError):
    """The tier did not answer in time."""

    default_retryable = True


class TierAuthError(TierError):
    """The tier refused the credentials."""


class TierCapacityError(TierError):
    """The tier is full and could not make room."""


class TierContractError(TierError):
    """The backend broke the contract: a bug of its author, which the message names."""


@contextmanager
def map_exceptions(
    mapping: Mapping[type[BaseException] | tuple[type[BaseException], ...], type[TierError]],
) -> Iterator[None]:
    """Translate a client library's exceptions into the designed ones.

    The first entry that matches wins, so put subclasses before their bases. The original stays
    as ``__cause__``; a :class:`TierError` passes through unchanged.

    Args:
        mapping: ``{theirs: ours}``; a key may be a tuple of classes.

    Raises:
        TierError: of the mapped class, with the original's text as its message.
    """
    try:
        yield
    except TierError:
        raise
    except Exception as error:
        for theirs, ours in mapping.items():
            if isinstance(error, theirs):
                raise ours(str(error) or type(error).__name__) from error
        raise
