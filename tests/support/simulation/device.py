"""A simulated accelerator, whose copies move real bytes and take time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvtier_sdk.pool import HostPool
from kvtier_sdk.types import OffloadKey
from support.simulation.breach import short

#: The byte that fills a slot until the device has written the slot.
_NOISE = b"\xbb"
_LONGEST_COPY_STEPS = 8


@dataclass(eq=False, slots=True)
class Copy:
    request_id: str
    key: OffloadKey
    slot: int
    due_step: int  # the first step in which the copy may end
    writes: bool  # the device writes the slot; otherwise it reads the slot
    written: bool = False


class Device:
    def __init__(
        self,
        pool: HostPool,
        content: dict[OffloadKey, bytes],
        rng: random.Random,
        on_breach: Callable[[str, str], None],
    ) -> None:
        self.live: list[Copy] = []
        # Copies that began before a reset. They continue, but the engine never completes them.
        self.stale: list[Copy] = []
        self._views = [pool.view(slot) for slot in range(pool.slots)]
        self._content = content
        self._rng = rng
        self._on_breach = on_breach

    @property
    def all(self) -> list[Copy]:
        return self.live + self.stale

    def begin(
        self,
        request_id: str,
        keys: Sequence[OffloadKey],
        slots: Sequence[int],
        step: int,
        *,
        writes: bool,
    ) -> None:
        for key, slot in zip(keys, slots, strict=True):
            due_step = step + self._rng.choice((0, 1, 2, _LONGEST_COPY_STEPS))
            copy = Copy(request_id, key, slot, due_step, writes)
            self.live.append(copy)
            if writes:
                self._scribble(slot)
            else:
                self._compare(copy)

    def run(self) -> None:
        for copy in self.all:
            if copy.writes and not copy.written and self._rng.random() < 0.4:
                self._write(copy)

    def due(self, step: int) -> list[Copy]:
        return [copy for copy in self.live if copy.due_step <= step]

    def end(self, copies: Sequence[Copy], *, success: bool) -> None:
        """End copies. If the copies succeeded, write all bytes that have not arrived yet."""
        for copy in copies:
            if not copy.writes:
                self._compare(copy)
            elif success and not copy.written:
                self._write(copy)
            elif not success:
                self._scribble(copy.slot)
            self.live.remove(copy)

    def make_stale(self) -> None:
        """Record a reset: the copies in flight continue, but the engine will not complete them."""
        self.stale += self.live
        self.live = []

    def flush(self) -> None:
        """End the stale copies, which read and write their slots until then."""
        for copy in self.stale:
            if not copy.writes:
                self._compare(copy)
            elif not copy.written:
                self._write(copy)
        self.stale = []

    def holds(self, slot: int, key: OffloadKey) -> bool:
        return bytes(self._views[slot]) == self._content.get(key)

    def close(self) -> None:
        self._views.clear()

    def _compare(self, copy: Copy) -> None:
        if not self.holds(copy.slot, copy.key):
            self._on_breach(
                "only what was stored under a key reaches the device",
                f"{copy.request_id} reads other bytes than those of {short(copy.key)} from slot "
                f"{copy.slot}",
            )

    def _scribble(self, slot: int) -> None:
        view = self._views[slot]
        view[:] = _NOISE * len(view)

    def _write(self, copy: Copy) -> None:
        self._views[copy.slot][:] = self._content[copy.key]
        copy.written = True
