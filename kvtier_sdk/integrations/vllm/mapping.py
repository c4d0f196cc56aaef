"""The slots of vLLM's own host memory, as a runner sees them."""

from __future__ import annotations

from collections.abc import Callable

from kvtier_sdk.errors import ConfigError, KVTierError
from kvtier_sdk.pool.layout import ROW_ALIGNMENT


class EngineSlots:
    """Slots in a mapping that belongs to vLLM.

    Attributes:
        slots: how many there are.
        chunk_bytes: payload of a slot: a whole row, vLLM's padding included.

    Args:
        view: of shape (slots, row bytes), contiguous.
        on_close: called by :meth:`close`, if the mapping is not vLLM's to give back.

    Raises:
        ConfigError: rows do not begin at multiples of 4,096 bytes.
    """

    def __init__(self, view: memoryview, on_close: Callable[[], None] | None = None) -> None:
        shape = view.shape
        if shape is None or len(shape) != 2 or shape[1] % ROW_ALIGNMENT:
            raise ConfigError(
                f"vLLM's host memory has shape {shape}; expected slots of a multiple of "
                f"{ROW_ALIGNMENT} bytes"
            )
        self.slots, self.chunk_bytes = shape
        # vLLM releases its view when it shuts down, which an array made from it would forbid.
        self._on_close = on_close
        self._bytes: memoryview | None = view.cast("B")

    def view(self, slot: int, holder: str = "nobody named") -> memoryview:
        """A slot's payload.

        Args:
            slot: index, from 0.
            holder: who gets it.

        Returns:
            A writable view of ``chunk_bytes`` bytes; it keeps the memory alive.

        Raises:
            IndexError: there is no such slot.
            KVTierError: the mapping was given back.
        """
        return self.padded_view(slot, 1, holder)

    def padded_view(self, slot: int, alignment: int, holder: str = "nobody named") -> memoryview:
        """As :meth:`view`: a row is a multiple of every alignment that a tier may ask for."""
        if not 0 <= slot < self.slots:
            raise IndexError(f"slot {slot} of {self.slots}")
        if self._bytes is None:
            raise KVTierError("vLLM's host memory has been given back")
        start = slot * self.chunk_bytes
        return self._bytes[start : start + self.chunk_bytes]

    def close(self) -> None:
        """Let go of the mapping."""
        self._bytes = None
        if self._on_close is not None:
            self._on_close()
