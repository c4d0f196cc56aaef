"""Every error that the SDK raises or that a backend may raise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Self


class KVTierError(Exception):
    """The base class of all SDK errors."""


class ConfigError(KVTierError, ValueError):
    """A setting is wrong; the message names the setting and says what to write instead."""


class ReplayError(KVTierError):
    """A workload cannot be replayed, for example because its file is missing or malformed."""


class BackendError(KVTierError):
    """A backend, policy or codec cannot be found or loaded."""


class UnknownBackendError(BackendError):
    """No installed package offers a backend, policy or codec of that name."""


class DuplicateBackendError(BackendError):
    """Two installed packages offer a backend, policy or codec of the same name."""


class BackendLoadError(BackendError):
    """A backend, policy or codec was found, but cannot be imported or breaks the contract."""


class TierError(KVTierError):
    """An operation of a tier failed.

    Args:
        message: a description of the failure for an operator.
        retryable: true if the same call may soon succeed; by default :attr:`default_retryable`.

    Attributes:
        tier: the tier's name, which the runner sets.
        operation: the failed operation, such as ``"lookup"``; the runner sets it.
    """

    default_retryable: ClassVar[bool] = False
    # Defaults for subclasses whose constructors do not call this class's constructor.
    retryable: bool = False
    tier: str | None = None
    operation: str | None = None

    def __init__(self, message: str, *, retryable: bool | None = None) -> None:
        super().__init__(message)
        self.retryable = self.default_retryable if retryable is None else retryable

    def __str__(self) -> str:
        where = " ".join(part for part in (self.tier, self.operation) if part)
        return f"{where}: {self.args[0]}" if where else str(self.args[0])

    def labelled(self, tier: str, operation: str) -> Self:
        """Set ``tier`` and ``operation``, as the runner does; return this error."""
        self.tier, self.operation = tier, operation
        return self

    def detached(self) -> Self:
        """Drop the cause and all tracebacks; return this error.

        A traceback's frames keep the failed call's buffers alive. The causes lose their tracebacks
        too, because a client library in Rust may keep a cause alive until its next call.
        """
        for error in chain_of(self):
            error.__traceback__ = None
        # Use an alias, because type checkers treat an assignment to ``self`` as a declaration.
        own: BaseException = self
        own.__cause__ = own.__context__ = None
        return self


class ChunkError(TierError):
    """One chunk's object cannot be read or replaced; other chunks' objects may be fine.

    Examples are a file with a bad sector and a file that belongs to another user. An unreachable
    server fails every chunk, so its error is a :class:`TierUnavailableError`. Errors of one chunk
    never open a circuit breaker. Several chunks' errors can open it if no call succeeds in between.
    """


class ChunkNotFoundError(ChunkError):
    """The tier does not have the chunk, or has lost it. The chunk counts as a miss."""


class CorruptChunkError(ChunkError):
    """The object under the key is not this chunk, or is damaged or truncated."""


class ChunkAuthError(CorruptChunkError):
    """A sealed chunk cannot be opened: it was forged, moved, damaged, or sealed with another key.

    Args:
        message: see :class:`TierError`, which also describes ``retryable``.
        unknown_key: true if the chunk names a key that this engine does not have. Another engine
            may have the key, so the chunk is not deleted.
    """

    def __init__(
        self, message: str, *, retryable: bool | None = None, unknown_key: bool = False
    ) -> None:
        super().__init__(message, retryable=retryable)
        self.unknown_key = unknown_key


class TierUnavailableError(TierError):
    """The tier cannot be reached; ``lookup`` raises this error instead of answering ``False``."""

    default_retryable = True


class TierTimeoutError(TierError):
    """The tier did not answer in time."""

    default_retryable = True


class TierAuthError(TierError):
    """The tier refused the credentials."""


class TierCapacityError(TierError):
    """The tier is full and could not make room."""


class TierContractError(TierError):
    """The backend broke the contract; the message describes the bug for its author."""


def check_any_answered(outcomes: Iterable[object]) -> None:
    """Raise the first :class:`TierError` if all ``outcomes`` are errors: no server has answered.

    ::

        async def lookup(self, keys, request):
            outcomes = await self._ask_each_server(keys)  # a TierError per key of a dead server
            check_any_answered(outcomes)
            return [outcome is True for outcome in outcomes]
    """
    answers = list(outcomes)
    faults = [answer for answer in answers if isinstance(answer, TierError)]
    if faults and len(faults) == len(answers):
        raise faults[0]


def chain_of(error: BaseException) -> list[BaseException]:
    """Return an exception with all its causes and contexts, and with the members of groups."""
    chain: dict[int, BaseException] = {}
    waiting = [error]
    while waiting:
        one = waiting.pop()
        if id(one) not in chain:
            chain[id(one)] = one
            waiting += filter(None, (one.__cause__, one.__context__))
            waiting += one.exceptions if isinstance(one, BaseExceptionGroup) else ()
    return list(chain.values())


@contextmanager
def map_exceptions(mapping: Mapping[Any, type[TierError]]) -> Iterator[None]:
    """Translate a client library's exceptions into SDK errors.

    ``mapping`` maps a class, or a tuple of classes, to the error to raise. The first match wins, so
    put subclasses before their bases. The new error has the original text, and the original error
    as its ``__cause__``. A :class:`TierError` and unlisted exceptions pass unchanged.

    ::

        with map_exceptions({FileNotFoundError: ChunkNotFoundError, OSError: TierUnavailableError}):
            data = await run_blocking(path.read_bytes)
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
