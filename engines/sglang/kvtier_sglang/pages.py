"""Moves pages between SGLang's host pools and a tier, in place or through kvtier's memory."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from kvtier_sdk import ConfigError, HostPool, Operation, PoolLayout, Region
from kvtier_sdk.engine import ROW_ALIGNMENT, EngineMemory, OverlappingSlots, PoolMemory

#: The maximum number of bytes in kvtier's memory at once, for each direction.
_STAGING_BYTES = 128 << 20
#: The maximum number of pages that SGLang moves in one call.
_MOST_PAGES = 128

#: A function that moves pages. It gets their positions in SGLang's call, and the slots of all parts
#: in page order. It returns true for each page whose parts were all moved.
Move: TypeAlias = Callable[[range, Sequence[int]], list[bool]]


class Pages(ABC):
    """The pages of a host pool, each in one or more parts of the same length.

    Attributes:
        memory: the slots; a part of a page fills one slot.
        parts: the number of parts of a page.
        tokens: the number of tokens of a page. SGLang passes one index for each token.
    """

    memory: PoolMemory
    parts: int

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.tokens: int = getattr(pool, "page_size", 1)

    @abstractmethod
    def move(self, operation: Operation, indices: torch.Tensor, move: Move) -> list[bool]:
        """Move pages between the host pool and a tier; return true for each moved page."""

    @abstractmethod
    def close(self) -> None: ...


class PlacedPages(Pages):
    """Pages that a tier reads and writes in place."""

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        addresses, sizes = _places_of(pool)
        self.parts = len(addresses)
        tensor = pool.kv_buffer
        self._memory = EngineMemory("SGLang", Region(tensor.data_ptr(), tensor.nbytes))
        self.memory = OverlappingSlots(self._memory, sizes[0])

    def move(self, operation: Operation, indices: torch.Tensor, move: Move) -> list[bool]:
        addresses, _ = self._pool.get_page_buffer_meta(indices)
        start = self._memory.region.address
        slots = [(address - start) // ROW_ALIGNMENT for address in addresses]
        return move(range(len(slots) // self.parts), slots)

    def close(self) -> None:
        self._memory.close()


class StagedPages(Pages):
    """Pages that are copied to and from kvtier's shared memory, a few at a time."""

    parts = 1

    def __init__(self, pool: Any) -> None:
        super().__init__(pool)
        page = pool.get_dummy_flat_data_page()
        self._dtype = page.dtype
        self._at_once = max(1, min(_MOST_PAGES, _STAGING_BYTES // page.nbytes))
        self._staging = HostPool.create(PoolLayout(2 * self._at_once, page.nbytes), prefault=False)
        self.memory = self._staging
        # SGLang loads in one thread and stores in another, so each thread has half of the slots.
        self._first_slots = {Operation.LOAD: 0, Operation.STORE: self._at_once}
        self._locks = {operation: threading.Lock() for operation in self._first_slots}

    def move(self, operation: Operation, indices: torch.Tensor, move: Move) -> list[bool]:
        firsts: list[int] = indices[:: self.tokens].tolist()

        def fill(number: int, slot: torch.Tensor) -> None:
            page = self._pool.get_data_page(firsts[number], flat=False)
            slot.view(page.shape).copy_(page)

        def take(number: int, slot: torch.Tensor) -> None:
            self._pool.set_from_flat_data_page(firsts[number], slot)

        return self._through(operation, len(firsts), move, fill, take)

    def move_tensors(
        self, operation: Operation, tensors: Sequence[torch.Tensor], move: Move
    ) -> list[bool]:
        """Move flat pages, given as tensors; return true for each moved page."""

        def fill(number: int, slot: torch.Tensor) -> None:
            slot.copy_(tensors[number].view(self._dtype).flatten())

        def take(number: int, slot: torch.Tensor) -> None:
            tensors[number].view(self._dtype).copy_(slot.view(tensors[number].shape))

        return self._through(operation, len(tensors), move, fill, take)

    def close(self) -> None:
        self._staging.close()

    def _through(
        self,
        operation: Operation,
        pages: int,
        move: Move,
        fill: Callable[[int, torch.Tensor], None],
        take: Callable[[int, torch.Tensor], None],
    ) -> list[bool]:
        first_slot = self._first_slots[operation]
        moved: list[bool] = []
        with self._locks[operation]:
            for start in range(0, pages, self._at_once):
                part = range(start, min(start + self._at_once, pages))
                slots = [first_slot + number - start for number in part]
                if operation is Operation.STORE:
                    for number, slot in zip(part, slots, strict=True):
                        fill(number, self._tensor(slot))
                succeeded = move(part, slots)
                if operation is Operation.LOAD:
                    for number, slot, is_there in zip(part, slots, succeeded, strict=True):
                        if is_there:
                            take(number, self._tensor(slot))
                moved += succeeded
                if not all(succeeded):
                    # Stop here, because SGLang ignores all pages after the first missing page.
                    break
        return moved + [False] * (pages - len(moved))

    def _tensor(self, slot: int) -> torch.Tensor:
        return torch.frombuffer(self._staging.view(slot), dtype=self._dtype)


def lie_whole(pool: Any) -> bool:
    """Return true if a tier can move a host pool's pages in place, in parts of equal length."""
    buffer = getattr(pool, "kv_buffer", None)
    if not isinstance(buffer, torch.Tensor) or pool.layout == "layer_first":
        return False
    try:
        addresses, sizes = _places_of(pool)
    except (AttributeError, NotImplementedError, ValueError):
        return False
    start, end = buffer.data_ptr(), buffer.data_ptr() + buffer.nbytes
    return (
        start % ROW_ALIGNMENT == 0
        and len(set(sizes)) == 1
        and all(
            start <= address <= end - size
            and (address - start) % ROW_ALIGNMENT == 0
            and size % ROW_ALIGNMENT == 0
            for address, size in zip(addresses, sizes, strict=True)
        )
    )


def pages_of(pool: Any, *, in_place: bool) -> Pages:
    if in_place and lie_whole(pool):
        return PlacedPages(pool)
    try:
        return StagedPages(pool)
    except (AttributeError, NotImplementedError) as error:
        raise ConfigError(
            f"pages of SGLang's {type(pool).__name__} cannot be stored: {error}"
        ) from error


def _places_of(pool: Any) -> tuple[list[int], list[int]]:
    """Return the address and length of each part of the pool's second page."""
    size = pool.page_size
    addresses, sizes = pool.get_page_buffer_meta(torch.arange(size, 2 * size))
    return list(addresses), list(sizes)
