"""The layout of a host pool, the file header that stores it, and the slots' memory."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Protocol

from kvtier_sdk.chunk_header import round_up
from kvtier_sdk.errors import ConfigError
from kvtier_sdk.types import Region

#: Rows begin at multiples of this many bytes, as direct I/O requires.
ROW_ALIGNMENT = 4096
#: The parts of a row begin at multiples of this many bytes, so workers share no cache line.
PART_ALIGNMENT = 64
#: A pool file's header follows the last row. No process maps it, so stray writes cannot damage it.
HEADER_BYTES = 4096

_MAGIC = b"KVTIPOOL"
_FORMAT = 1
_HEADER = struct.Struct("<8sIIQQQ")


@dataclass(frozen=True)
class PoolLayout:
    """The geometry of a host pool, the same in all processes that map the pool.

    The memory of a slot is a row, which holds the parts of all workers in order. Parts begin at
    multiples of 64 bytes, and rows begin at multiples of 4,096 bytes.

    Attributes:
        slots: number of slots, at least 1.
        part_bytes: number of bytes of a chunk that one worker holds, at least 1.
        workers: number of workers that map the pool, at least 1.
        replicated: true if all workers hold the same bytes. Then a row has a single part, which
            worker 0 writes and all workers read.
        stride_bytes: distance between slots, a multiple of 4,096, if the engine places the chunks
            in its own memory; otherwise None. A chunk may begin at any slot. Slots may overlap,
            but the engine never uses overlapping slots at the same time.

    Raises:
        ConfigError: a number is out of range.
    """

    slots: int
    part_bytes: int
    workers: int = 1
    replicated: bool = False
    stride_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.slots < 1 or self.part_bytes < 1:
            raise ConfigError(
                "a host pool needs at least one slot of one byte, "
                f"not {self.slots} of {self.part_bytes}"
            )
        if self.workers < 1:
            raise ConfigError(f"a host pool needs at least one worker, not {self.workers}")

    @property
    def parts(self) -> int:
        """Number of parts in a row."""
        return 1 if self.replicated else self.workers

    @property
    def chunk_bytes(self) -> int:
        """Length of a chunk in secondary tiers: a slot's parts and the padding between them."""
        return (self.parts - 1) * round_up(self.part_bytes, PART_ALIGNMENT) + self.part_bytes

    @property
    def row_bytes(self) -> int:
        """Distance between slots; by default ``chunk_bytes`` rounded up to a multiple of 4,096."""
        return self.stride_bytes or round_up(self.chunk_bytes, ROW_ALIGNMENT)

    @property
    def size_bytes(self) -> int:
        """Size of the whole pool, without the header."""
        return (self.slots - 1) * self.row_bytes + round_up(self.chunk_bytes, ROW_ALIGNMENT)

    def check_worker(self, worker: int) -> None:
        """Raise ``ConfigError`` unless ``worker`` is in the range from 0 to ``workers`` - 1."""
        if not 0 <= worker < self.workers:
            raise ConfigError(
                f"worker {worker} of a host pool of {self.workers}: "
                f"workers are numbered 0 to {self.workers - 1}"
            )

    def part_offset(self, worker: int) -> int:
        """Check ``worker``, and return the offset of its part in a row."""
        self.check_worker(worker)
        return 0 if self.replicated else worker * round_up(self.part_bytes, PART_ALIGNMENT)

    def to_header(self) -> bytes:
        """Return the header that :meth:`from_header` reads."""
        fields = self.slots, self.part_bytes, self.workers
        return _HEADER.pack(_MAGIC, _FORMAT, self.replicated, *fields).ljust(HEADER_BYTES, b"\0")

    @classmethod
    def from_header(cls, header: bytes) -> PoolLayout | None:
        """Read a layout from ``header``, the last 4,096 bytes of a file.

        Return None if ``header`` is not a host pool's; raise ``ConfigError`` for an unknown format.
        """
        if len(header) != HEADER_BYTES or not header.startswith(_MAGIC):
            return None
        _, version, replicated, slots, part_bytes, workers = _HEADER.unpack_from(header)
        if version != _FORMAT:
            raise ConfigError(
                f"the host pool has format {version}, and this kvtier-sdk reads {_FORMAT}: use one "
                "version of kvtier-sdk in all processes of a replica"
            )
        return cls(slots, part_bytes, workers, bool(replicated))


class PoolMemory(Protocol):
    """A tier runner's interface to the slots' memory, which a host pool or the engine owns."""

    @property
    def chunk_bytes(self) -> int:
        """Length of a slot's payload, in bytes."""

    @property
    def region(self) -> Region:
        """The memory of all slots with their padding, as mapped in this process."""

    def padded_view(self, slot: int, alignment: int) -> memoryview:
        """Return a slot's payload, extended to a multiple of ``alignment``, a power of two."""

    @property
    def slots(self) -> int:
        """Number of slots."""

    @property
    def layout(self) -> PoolLayout:
        """Offsets and lengths of the slots in the mapping."""

    @property
    def is_shared(self) -> bool:
        """True if another process can map the memory."""

    @property
    def fd(self) -> int:
        """The shared memory's file descriptor, which stays open until the pool is closed."""
