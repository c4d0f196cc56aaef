"""Reads a tier's secrets again when its store refuses them: their files may have changed."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvtier_sdk.aio.blocking import run_blocking
from kvtier_sdk.errors import TierAuthError
from kvtier_sdk.options.secrets import Secrets
from kvtier_sdk.runner.log import TierLog

T = TypeVar("T")


class SecretRenewal:
    """Renews a tier's secrets from their files.

    Attributes:
        version: a number that grows with each change of a secret.
    """

    def __init__(self, secrets: Secrets, log: TierLog) -> None:
        self._secrets = secrets
        self._log = log
        self.version = 0

    async def call(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await a call; repeat it once if it was refused with an outdated secret."""
        version = self.version
        try:
            return await call()
        except TierAuthError:
            if not await self.has_changed(version):
                raise
        return await call()

    async def has_changed(self, version: int) -> bool:
        """Return true if a secret has changed since a version; read the files if needed."""
        if self._secrets.files and version == self.version:
            await run_blocking(self._read)
        return version != self.version

    def _read(self) -> None:
        for file in self._secrets.files:
            try:
                if file.read_again():
                    self.version += 1
                    self._log.warning("the store refused; a new secret was read from %s", file.path)
            except (OSError, ValueError) as error:
                fault = getattr(error, "strerror", None) or error
                text = f"{self._log.tier}: {file.path} cannot be read again: {fault}"
                self._log.often(logging.WARNING, f"secret in {file.path}", text)
