"""Reads a tier's secrets again when its store refuses them: they can be changed in place."""

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
    """Renews the secrets that lie in files.

    Args:
        secrets: the tier's.
        log: the tier's.
    """

    def __init__(self, secrets: Secrets, log: TierLog) -> None:
        self._secrets = secrets
        self._log = log

    @property
    def version(self) -> int:
        """A number that grows with each change of a secret."""
        return self._secrets.version

    async def call(self, call: Callable[[], Awaitable[T]]) -> T:
        """Await a call; if it was refused with a secret that is out of date, once more."""
        version = self.version
        try:
            return await call()
        except TierAuthError:
            if not await self.has_changed(version):
                raise
        return await call()

    async def has_changed(self, version: int) -> bool:
        """Read the files again, unless another call has done so.

        Args:
            version: :attr:`version` when the call was made that was refused.

        Returns:
            True if a secret is another one by now.
        """
        if self._secrets.files and version == self.version:
            await run_blocking(self._read)
        return version != self.version

    def warn_of_public_files(self) -> None:
        """Log the files that other users may read."""
        for file in self._secrets.files:
            if file.is_public:
                self._log.warning(
                    "%s holds a secret, and all users of this machine may read it", file.path
                )

    def _read(self) -> None:
        for file in self._secrets.files:
            try:
                if file.read_again():
                    self._log.warning("the store refused; a new secret was read from %s", file.path)
            except (OSError, ValueError) as error:
                fault = getattr(error, "strerror", None) or error
                text = f"{self._log.tier}: {file.path} cannot be read again: {fault}"
                self._log.often(logging.WARNING, f"secret in {file.path}", text)
