"""The interface between the ``kvtier`` command and an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from kvtier_sdk.config.tiering_config import TieringConfig
from kvtier_sdk.types import OffloadKey


class EngineTools(ABC):
    """An engine's configuration, keys and commands, for the ``kvtier`` command.

    An engine's package declares a subclass as an entry point of the group ``kvtier.engines``. The
    entry point's name is the first word of the namespaces' fact ``engine``. The constructor takes
    no arguments. The module must not import the engine, because the command also runs without it.

    Attributes:
        commands: additional ``kvtier`` commands. Each name maps to a typer function.
        pool_directory: the directory of a shared host pool; ``None`` if processes share no pool.
    """

    commands: ClassVar[Mapping[str, Callable[..., None]]] = {}
    pool_directory: ClassVar[str | None] = None

    @abstractmethod
    def reads(self, options: Mapping[str, Any]) -> bool:
        """Return true if ``options`` are this engine's configuration, not kvtier's."""

    @abstractmethod
    def read(self, options: Mapping[str, Any], *, where: str) -> TieringConfig:
        """Read the host pool and the tiers from ``options``, the engine's whole configuration.

        Each error message begins with ``where``, the source of the options.

        Raises:
            ConfigError: an option is wrong, or the configuration does not use kvtier.
        """

    @abstractmethod
    def chunk_keys(
        self, tokens: Sequence[int], facts: Mapping[str, Any], salt: str | None
    ) -> list[list[OffloadKey]]:
        """Return the engine's keys for a prompt's chunks: a list for each KV-cache group.

        ``tokens`` are token ids, ``facts`` are the namespace's, and ``salt`` is the cache salt.

        Raises:
            ConfigError: the facts do not determine the keys.
        """

    def in_its_words(self, message: str) -> str:
        """Rewrite a ``message`` about a :class:`TieringConfig` to use the engine's option names."""
        return message
