"""The interface between a benchmark and an engine's storage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch


class Storage(ABC):
    """An engine's storage, and the memory of the batch that it stores and loads."""

    #: Length of a stored object. Shorter files, such as manifests, are not objects.
    object_bytes: int

    @abstractmethod
    def parts(self) -> Sequence[torch.Tensor]:
        """Return the pieces of the batch's memory, in order."""

    @abstractmethod
    def store(self, number: int) -> None: ...

    def find(self, number: int) -> None:
        """Look the batch up, if a load needs an earlier lookup."""
        return

    @abstractmethod
    def load(self, number: int) -> None: ...

    def clear(self) -> None:
        """Remove stored objects that are not files."""
        return

    def fill(self) -> list[torch.Tensor]:
        return [part.view(torch.uint8).random_().clone() for part in self.parts()]

    def wipe(self) -> None:
        for part in self.parts():
            part.zero_()

    def holds(self, content: Sequence[torch.Tensor]) -> bool:
        parts = (part.view(torch.uint8) for part in self.parts())
        return all(part.equal(kept) for part, kept in zip(parts, content, strict=True))
