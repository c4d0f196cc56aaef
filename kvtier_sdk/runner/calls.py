"""Calls a tier, checks its answers, labels its errors and masks secrets."""

from __future__ import annotations

import asyncio
import logging
import operator
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import astuple, dataclass
from typing import Any, TypeVar

import numpy as np

from kvtier_sdk.aio.blocking import run_blocking
from kvtier_sdk.aio.clock import Clock
from kvtier_sdk.contract import SecondaryTierManager
from kvtier_sdk.errors import ConfigError, TierAuthError, TierContractError, TierError
from kvtier_sdk.namespace import StoredNamespace
from kvtier_sdk.options.secrets import Secrets, masked_error
from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.runner.log import TierLog
from kvtier_sdk.types import Capability, Entry, OffloadKey, RequestContext, Transfer, Usage

T = TypeVar("T")

_MOST_DELETED = 256


class NonsenseError(Exception):
    """A tier returned an invalid answer."""


@dataclass(eq=False)
class TierCaller:
    """A tier whose calls return valid results or raise :class:`TierError`.

    A wrong number or type of results puts the tier into quarantine: every later call fails with the
    same message. Other errors, and an invalid answer to ``usage``, fail only their own call or
    chunk. If the store refuses a secret whose file has changed, the call is repeated once.
    """

    _make_tier: Callable[[], SecondaryTierManager]
    _secrets: Secrets
    log: TierLog
    quarantine: TierContractError | None = None
    _is_used: bool = False
    _version: int = 0  # the number of times that a secret has changed

    def __post_init__(self) -> None:
        self.tier = self._new_tier()

    @property
    def clock(self) -> Clock:
        return self.tier.context.clock

    @property
    def can_delete(self) -> bool:
        """True if the SDK may delete chunks on its own initiative."""
        tier = self.tier
        return Capability.DELETE in tier.capabilities and not tier.context.maintenance

    async def open(self) -> None:
        """Open the tier. A second call closes the first tier object and opens a new one."""
        await self._renewing(self._open_once)

    async def _open_once(self) -> None:
        if self._is_used:
            await self.close()
            self.tier = self._new_tier()
        self._is_used = True
        await self._once("open", self.tier.open)

    def _new_tier(self) -> SecondaryTierManager:
        try:
            return self._make_tier()
        except Exception as error:
            masked = masked_error(error, self._secrets)
        raise masked

    async def close(self) -> None:
        """Close the tier; log an error instead of raising it."""
        try:
            await self.tier.close()
        except BaseException as error:
            if is_not_tiers(error):
                raise
            self.log.exception("closing the tier failed")

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        answer = await self._guarded("lookup", lambda: self.tier.lookup(keys, request))
        return self._read("lookup", found_in, answer, len(keys))

    async def transfer(
        self, operation: Operation, batch: Sequence[Transfer]
    ) -> Sequence[TierError | None]:
        """Call ``load`` or ``store``. If the call raises, the error is the result of each chunk."""
        version = self._version
        errors = await self._transfer(operation.value, batch)
        is_refused = any(isinstance(error, TierAuthError) for error in errors)
        if is_refused and await self._has_new_secret(version):
            return await self._transfer(operation.value, batch)
        return errors

    async def _transfer(
        self, operation: str, batch: Sequence[Transfer]
    ) -> Sequence[TierError | None]:
        method = self.tier.load if operation == "load" else self.tier.store
        try:
            answer = await self._once(operation, lambda: method(batch))
            verdicts = self._read(operation, verdicts_in, answer, len(batch))
        except TierError as error:
            return [error.detached()] * len(batch)
        return [
            # Detach the error, because its cause's frames would keep the buffers alive.
            None if error is None else self._fault(error, operation).detached()
            for error in verdicts
        ]

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        await self._guarded("touch", lambda: self.tier.touch(keys))

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        await self._guarded("delete", lambda: self.tier.delete(keys))

    async def usage(self) -> Usage:
        answer = await self._guarded("usage", lambda: self.tier.usage())
        try:
            numbers: Any = [None if n is None else operator.index(n) for n in astuple(answer)]
            return Usage(*numbers)
        except TypeError:
            fault = TierContractError(f"returned {_misplaced(answer, 'a Usage of numbers')}")
            raise fault.labelled(self.log.tier, "usage") from None

    async def delete_all(self) -> None:
        """Delete every chunk that ``scan`` lists. After a cancellation, some chunks may remain."""

        async def list_keys() -> list[OffloadKey]:
            return [entry.key async for entry in self.entries()]

        # List all keys first, because deletions during a listing may make the listing skip chunks.
        keys = list(dict.fromkeys(await self._renewing(list_keys)))
        most = min(_MOST_DELETED, self.tier.max_batch_keys or _MOST_DELETED)
        for start in range(0, len(keys), most):
            await self.delete(keys[start : start + most])

    def entries(self) -> AsyncIterator[Entry]:
        return self._iterated("scan", self.tier.scan, Entry)

    def namespaces(self) -> AsyncIterator[StoredNamespace]:
        return self._iterated("namespaces", self.tier.namespaces, StoredNamespace)

    async def _iterated(
        self, operation: str, iterate: Callable[[], AsyncIterator[T]], kind: type[T]
    ) -> AsyncIterator[T]:
        items = iterate()
        ended: Any = object()

        def checked(item: Any) -> T:
            if not isinstance(item, kind):
                raise _misplaced(item, kind.__name__)
            return item

        # Do not retry a refused call, because an iterator ends after an error.
        while (item := await self._once(operation, lambda: anext(items, ended))) is not ended:
            yield self._read(operation, checked, item)

    async def _renewing(self, call: Callable[[], Awaitable[T]]) -> T:
        """Make the call; repeat it once if the store refused an outdated secret."""
        version = self._version
        try:
            return await call()
        except TierAuthError:
            if not await self._has_new_secret(version):
                raise
        return await call()

    async def _guarded(self, operation: str, call: Callable[[], Awaitable[T]]) -> T:
        return await self._renewing(lambda: self._once(operation, call))

    async def _once(self, operation: str, call: Callable[[], Awaitable[T]]) -> T:
        """Make one call. Raise an error as a TierError or ConfigError, with secrets masked."""
        if self.quarantine is not None:
            # Clear the traceback, because each raise would add frames to this long-lived error.
            raise self.quarantine.with_traceback(None)
        try:
            return await call()
        except BaseException as error:
            if is_not_tiers(error):
                raise
            fault = self._shown(error, operation)
        # Raise outside the handler. Inside it, Python would attach the unmasked error.
        try:
            raise fault
        finally:
            del fault  # the frame and the error would keep each other alive

    def _read(self, operation: str, read: Callable[..., T], *answer: Any) -> T:
        """Check an answer. An invalid answer puts the tier into quarantine."""
        try:
            return read(*answer)
        except NonsenseError as nonsense:
            error = TierContractError(f"returned {nonsense}; the tier is not used any more")
        self.quarantine = error.labelled(self.log.tier, operation)
        raise error

    def _shown(self, error: BaseException, operation: str) -> BaseException:
        if operation != "open" or not isinstance(error, ConfigError):
            return self._fault(error, operation)
        shown = masked_error(error, self._secrets)
        fault = ConfigError(f"tier {self.log.tier!r}: {shown}")
        fault.__cause__ = shown
        return fault

    def _fault(self, error: BaseException, operation: str) -> TierError:
        fault = masked_error(error, self._secrets)
        if isinstance(fault, asyncio.CancelledError):
            fault = TierContractError("raised CancelledError without being cancelled")
        elif not isinstance(fault, TierError):
            shown, fault = fault, TierContractError(f"raised {type(fault).__name__}: {fault}")
            fault.__cause__ = shown
        return fault.labelled(self.log.tier, operation)

    async def _has_new_secret(self, version: int) -> bool:
        """Return true if a secret is newer than ``version``, after reading changed files."""
        if self._secrets.files and version == self._version:
            await run_blocking(self._read_secrets)
        return version != self._version

    def _read_secrets(self) -> None:
        for file in self._secrets.files:
            try:
                if file.read_again():
                    self._version += 1
                    self.log.warning("the store refused; a new secret was read from %s", file.path)
            except (OSError, ValueError) as error:
                fault = getattr(error, "strerror", None) or error
                text = f"{self.log.tier}: {file.path} cannot be read again: {fault}"
                self.log.often(logging.WARNING, f"secret in {file.path}", text)


def is_not_tiers(error: BaseException) -> bool:
    """Return true for an error that no tier caused, such as the running task's cancellation."""
    # A SystemExit or a Rust panic counts as the tier's error, so it ends neither loop nor process.
    if isinstance(error, asyncio.CancelledError):
        task = asyncio.current_task()
        return task is not None and task.cancelling() > 0
    return isinstance(error, KeyboardInterrupt | GeneratorExit)


def found_in(answer: Any, count: int) -> list[bool]:
    answers = _items(answer, count)
    if not set(map(type, answers)) <= {bool}:
        for one in answers:
            if not (isinstance(one, int | np.integer | np.bool_) and one in (0, 1)):
                raise _misplaced(one, "a boolean")
    return list(map(bool, answers))


def verdicts_in(answer: Any, count: int) -> list[TierError | None]:
    verdicts = _items(answer, count)
    for one in verdicts:
        if not (one is None or isinstance(one, TierError)):
            raise _misplaced(one, "None or a TierError")
    return verdicts


def _items(answer: Any, count: int) -> list[Any]:
    try:
        given = len(answer)
    except TypeError:
        given = -1
    # Reject mappings and sets, because they do not keep the results in order.
    if given < 0 or isinstance(answer, Mapping | Set):
        raise NonsenseError(f"a {type(answer).__name__} for a batch of {count}")
    if given != count:
        raise NonsenseError(f"{given} results for a batch of {count}")
    return list(answer)


def _misplaced(one: object, wanted: str) -> NonsenseError:
    return NonsenseError(f"a {type(one).__name__} where {wanted} belongs")
