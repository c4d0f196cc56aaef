"""The interface of an engine's package to the command ``kvtier``."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from kvtier_sdk.config.tiering_config import TieringConfig
from kvtier_sdk.types import OffloadKey


class EngineTools(ABC):
    """An engine for the command ``kvtier``: its configuration, its keys, its own commands.

    An engine's package declares its class as an entry point of the group ``kvtier.engines``, under
    the engine's name in a namespace's fact ``engine``. The class is made without arguments. Its
    module must not import the engine: the command also runs where the engine is not installed.

    Attributes:
        commands: further commands of ``kvtier``, by name: functions for typer.
        pool_directory: the directory in which the engine's processes share the host pool; ``None``
            if they share none.
    """

    commands: ClassVar[Mapping[str, Callable[..., None]]] = {}
    pool_directory: ClassVar[str | None] = None

    @abstractmethod
    def reads(self, options: Mapping[str, Any]) -> bool:
        """Return true if ``options`` are this engine's configuration, and not kvtier's own."""

    @abstractmethod
    def read(self, options: Mapping[str, Any], *, where: str) -> TieringConfig:
        """Read the host pool and the tiers from ``options``, the engine's whole configuration.

        Each error message begins with its source, ``where``.

        Raises:
            ConfigError: an option is wrong, or nothing in it is kvtier's.
        """

    @abstractmethod
    def chunk_keys(self, tokens: Sequence[int], facts: Mapping[str, Any]) -> list[list[OffloadKey]]:
        """Compute the keys of a prompt's chunks as the engine does, for each KV-cache group.

        The prompt is given as ``tokens``, its token ids, and the namespace by its ``facts``.

        Raises:
            ConfigError: the facts do not determine the keys.
        """

    def in_its_words(self, message: str) -> str:
        """Return a ``message`` about a :class:`TieringConfig` with the engine's option names."""
        return message
