"""Registers host memory with the driver, because a copy of unregistered memory blocks the caller.

A process can register a page only once, and unregistering a page affects all of its users. So the
devices of a process share registered pieces, and each piece counts its users.
"""

from __future__ import annotations

import mmap
import threading
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from kvtier_sdk.errors import KVTierError
from kvtier_sdk.options.units import format_bytes
from kvtier_sdk.worker.driver import CUDADriver, forget_error
from kvtier_sdk.worker.planning import CopyPlan, HostLayout

#: Drivers refuse much larger registrations.
MAX_REGISTER_BYTES = 64 * 1024**3
#: ``cudaHostRegisterPortable``: the registration is valid in every context.
_PORTABLE = 1


class RefusedError(KVTierError):
    """Memory cannot be registered."""


@dataclass(eq=False)
class _Piece:
    """A range of whole pages that is registered with the driver."""

    begin: int
    end: int
    is_ours: bool  # true if this module registered the piece, false if the memory's owner did
    shift_bytes: int  # the device's address of a byte minus the host's address of this byte
    holders: int = 0


_lock = threading.Lock()
_pieces: list[_Piece] = []


class Registration:
    """Registers all slots until :meth:`release`. If this fails, no slot stays registered."""

    def __init__(self, host: HostLayout, driver: CUDADriver) -> None:
        self._held: list[_Piece] = []
        with _lock:
            try:
                for begin, end in pairwise(_cuts(host)):
                    self._hold(begin, end, host, driver)
            except BaseException:
                self._let_go()
                raise
        self._begins = np.array([piece.begin for piece in self._held], np.int64)
        self._shifts = np.array([piece.shift_bytes for piece in self._held], np.int64)

    def fit(self, plan: CopyPlan) -> CopyPlan:
        """Cut the plan's runs where pieces meet, and replace host addresses with the device's."""
        if len(self._begins) > 1:
            plan = plan.cut_at(self._begins)
        if self._shifts.any():
            pieces = self._begins.searchsorted(plan.host, side="right") - 1
            plan = replace(plan, host=plan.host + self._shifts[pieces])
        return plan

    def release(self) -> None:
        """Unregister the pieces that no other registration uses."""
        with _lock:
            self._let_go()

    def _hold(self, begin: int, end: int, host: HostLayout, driver: CUDADriver) -> None:
        """Share already registered pieces, and register the pages between them."""
        while begin < end:
            piece = next((piece for piece in _pieces if piece.begin <= begin < piece.end), None)
            if piece is None:
                stop = min((piece.begin for piece in _pieces if begin < piece.begin), default=end)
                piece = _register(begin, min(stop, end), host, driver)
                _pieces.append(piece)
            if piece not in self._held:
                piece.holders += 1
                self._held.append(piece)
            begin = piece.end

    def _let_go(self) -> None:
        while self._held:
            piece = self._held.pop()
            piece.holders -= 1
            if piece.holders:
                continue
            _pieces.remove(piece)
            if piece.is_ours and int(torch.cuda.cudart().cudaHostUnregister(piece.begin)):
                forget_error()


def _register(begin: int, end: int, host: HostLayout, driver: CUDADriver) -> _Piece:
    first, last = max(begin, host.address), min(end, host.end) - 1
    address = driver.device_address(first)
    # Share pages that their owner has registered, such as the pages of torch's pinned tensors.
    is_ours = address is None or driver.device_address(last) is None
    if is_ours:
        size = format_bytes(end - begin)
        if not host.has_own_pages and (begin < host.address or host.end < end):
            # Do not register a part of another owner's memory. The driver refuses copies of a range
            # that is only partly registered, and the other owner's copies would fail.
            raise RefusedError(
                f"{size} of host memory cannot be registered, because it may share a page with "
                "other memory; use a HostPool, a mapping or pinned memory"
            )
        if status := int(torch.cuda.cudart().cudaHostRegister(begin, end - begin, _PORTABLE)):
            forget_error()
            raise RefusedError(
                f"the driver did not register {size} of host memory (error {status}): check "
                "`ulimit -l`"
            )
        address = driver.device_address(first)
    return _Piece(begin, end, is_ours, 0 if address is None else address - first)


def _cuts(host: HostLayout) -> list[int]:
    """Return the boundaries of the pieces, in ascending order. All are page boundaries."""
    page_bytes = mmap.PAGESIZE
    piece_bytes = max(1, MAX_REGISTER_BYTES // host.row_bytes) * host.row_bytes
    between = range(host.address + piece_bytes, host.end, piece_bytes)
    # A worker's part of a slot may begin inside a page, so round down to the start of the page.
    begins = [at - at % page_bytes for at in (host.address, *between)]
    return [*sorted(set(begins)), host.end + -host.end % page_bytes]
