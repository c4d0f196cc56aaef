"""Calls into a tier, held to the contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

from kvtier_sdk.contract import SecondaryTierManager
from kvtier_sdk.errors import TierAuthError, TierContractError, TierError
from kvtier_sdk.namespace import StoredNamespace
from kvtier_sdk.options.secrets import Secrets, masked_error
from kvtier_sdk.runner.answers import (
    NonsenseError,
    found_in,
    key_in,
    usage_in,
    verdicts_in,
)
from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.runner.secret_renewal import SecretRenewal
from kvtier_sdk.types import Entry, OffloadKey, RequestContext, Transfer, Usage

T = TypeVar("T")

#: Chunks deleted per call, at most.
_DELETE_CHUNKS = 256


async def masked_call(call: Callable[[], Awaitable[T]], secrets: Secrets) -> T:
    """Await a call of a tier; mask secrets in the error that it raises."""
    try:
        return await call()
    except (asyncio.CancelledError, KeyboardInterrupt, GeneratorExit):  # not the tier's errors
        raise
    except BaseException as error:
        masked = masked_error(error, secrets)
    # Raised outside of the handler, where the unmasked original would become its context.
    try:
        raise masked
    finally:
        del masked  # the frame and the error would keep each other alive


class TierCaller:
    """Turns the outcome of each call into results of the right shape or a :class:`TierError`.

    A tier that returns a wrong number of results, or anything other than results, cannot be
    trusted: it is put into quarantine, and every later call fails with the same message. An
    exception other than a :class:`TierError`, an error that cannot be read, or an invalid answer to
    ``usage`` fails only its own call or chunk.

    A call that the store refuses is made once more if a secret has changed in its file.

    Attributes:
        tier: the tier; a new instance replaces one that did not open.
        quarantine: the error of all further calls, once the tier has broken the contract.
    """

    def __init__(
        self, tier: SecondaryTierManager, secrets: Secrets, renewal: SecretRenewal
    ) -> None:
        self.tier = tier
        self._secrets = secrets
        self._renewal = renewal
        self._name = tier.context.name
        self._delete_chunks = min(_DELETE_CHUNKS, tier.max_batch_keys or _DELETE_CHUNKS)
        self.quarantine: TierContractError | None = None

    async def lookup(self, keys: Sequence[OffloadKey], request: RequestContext) -> Sequence[bool]:
        """Call the tier's ``lookup``; raise only :class:`TierError`."""
        operation = Operation.LOOKUP.value
        answer = await self._guarded(operation, lambda: self.tier.lookup(keys, request))
        try:
            return found_in(answer, len(keys))
        except NonsenseError as nonsense:
            raise self._end(nonsense, operation) from None

    async def transfer(
        self, operation: Operation, batch: Sequence[Transfer]
    ) -> Sequence[TierError | None]:
        """Call ``load`` or ``store``; an error of the whole batch becomes one for each chunk."""
        version = self._renewal.version
        errors = await self._transfer(operation, batch)
        if any(errors):
            is_refused = any(isinstance(error, TierAuthError) for error in errors)
            if is_refused and await self._renewal.has_changed(version):
                return await self._transfer(operation, batch)
        return errors

    async def _transfer(
        self, operation: Operation, batch: Sequence[Transfer]
    ) -> Sequence[TierError | None]:
        method = self.tier.load if operation is Operation.LOAD else self.tier.store
        try:
            answer = await self._guarded(operation.value, lambda: method(batch), renews=False)
            verdicts = verdicts_in(answer, len(batch))
        except TierError as error:
            return [error.detached()] * len(batch)
        except NonsenseError as nonsense:
            return [self._end(nonsense, operation.value)] * len(batch)
        return [
            # Detached even if the author did not: a cause's frames would hold the buffers.
            None if error is None else self._sign(self._masked(error), operation.value).detached()
            for error in verdicts
        ]

    async def touch(self, keys: Sequence[OffloadKey]) -> None:
        """Call the tier's ``touch``; raise only :class:`TierError`."""
        await self._guarded("touch", lambda: self.tier.touch(keys))

    async def delete(self, keys: Sequence[OffloadKey]) -> None:
        """Call the tier's ``delete``; raise only :class:`TierError`."""
        await self._guarded("delete", lambda: self.tier.delete(keys))

    async def usage(self) -> Usage:
        """Call the tier's ``usage``; raise only :class:`TierError`."""
        answer = await self._guarded("usage", lambda: self.tier.usage())
        try:
            return usage_in(answer)
        except NonsenseError as nonsense:
            raise self._sign(TierContractError(f"returned {nonsense}"), "usage") from None

    async def delete_all(self) -> None:
        """Delete every chunk of the namespace that ``scan`` yields; raise only :class:`TierError`.

        A cancellation leaves the chunks that were not reached.
        """

        async def list_keys() -> list[OffloadKey]:
            try:
                return [key_in(entry) async for entry in self.tier.scan()]
            except NonsenseError as nonsense:
                raise self._end(nonsense, "scan") from None

        # List first: a listing may miss chunks if others are deleted meanwhile.
        keys = list(dict.fromkeys(await self._guarded("scan", list_keys)))
        for start in range(0, len(keys), self._delete_chunks):
            await self.delete(keys[start : start + self._delete_chunks])

    def entries(self) -> AsyncIterator[Entry]:
        """Iterate over the entries of ``scan``; raise only :class:`TierError`."""
        return self._iterated("scan", self.tier.scan, Entry)

    def namespaces(self) -> AsyncIterator[StoredNamespace]:
        """Iterate over the store's namespaces; raise only :class:`TierError`."""
        return self._iterated("namespaces", self.tier.namespaces, StoredNamespace)

    async def _iterated(
        self, operation: str, iterate: Callable[[], AsyncIterator[T]], kind: type[T]
    ) -> AsyncIterator[T]:
        items = iterate()
        ended: Any = object()
        while True:
            item = await self._guarded(operation, lambda: anext(items, ended))
            if item is ended:
                return
            if type(item) is not kind:
                text = f"a {type(item).__name__} where one {kind.__name__} belongs"
                raise self._end(NonsenseError(text), operation)
            yield item

    def _end(self, nonsense: NonsenseError, operation: str) -> TierContractError:
        """Put the tier into quarantine for an invalid answer; return the error."""
        error = TierContractError(f"returned {nonsense}; the tier is not used any more")
        error.tier, error.operation = self._name, operation
        self.quarantine = error
        return error

    async def _guarded(
        self, operation: str, call: Callable[[], Awaitable[T]], renews: bool = True
    ) -> T:
        """Await a call; repeat it once if it was refused with an outdated secret."""
        version = self._renewal.version
        while True:
            if self.quarantine is not None:
                raise self.quarantine
            try:
                return await call()
            except BaseException as error:
                fault = self._fault(error, operation)
            try:
                if not (renews and isinstance(fault, TierAuthError)):
                    raise fault
                if not await self._renewal.has_changed(version):
                    raise fault
            finally:
                del fault  # the frame and the error would keep each other alive
            renews = False

    def _fault(self, error: BaseException, operation: str) -> TierError:
        """Turn a call's exception into a TierError; re-raise interrupts and our own cancellations.

        A SystemExit counts as the tier's error: it would end only the tier's thread, not the
        process. So does the BaseException of a Rust client's panic.
        """
        if isinstance(error, KeyboardInterrupt | GeneratorExit):
            raise error
        if isinstance(error, asyncio.CancelledError):
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise error
            fault: TierError = TierContractError("raised CancelledError without being cancelled")
        else:
            shown = masked_error(error, self._secrets)
            if isinstance(shown, TierError):
                fault = shown
            else:
                fault = TierContractError(f"raised {type(shown).__name__}: {shown}")
                fault.__cause__ = shown
        return self._sign(fault, operation)

    def _masked(self, error: TierError) -> TierError:
        masked = masked_error(error, self._secrets)
        assert isinstance(masked, TierError)
        return masked

    def _sign(self, error: TierError, operation: str) -> TierError:
        """Name tier and operation in an error."""
        error.tier, error.operation = self._name, operation
        return error
