"""Current credentials, from the options or from the sources of AWS tools."""

from __future__ import annotations

import logging
from typing import Any

from aiobotocore.credentials import AioCredentials
from aiobotocore.session import AioSession
from botocore.credentials import ReadOnlyCredentials

from kvtier_s3.config import S3TierConfig
from kvtier_sdk import Clock, TierAuthError

#: Minimum time between two searches for credentials.
_FIND_PAUSE_S = 0.5


class CurrentCredentials(AioCredentials):  # type: ignore[misc]
    """The current credentials. If the server refuses them, a search may find new ones.

    All requests, including botocore's, are signed with this object, so a change applies at once.
    Credentials in the options need no search, because the runner rereads their files.
    """

    def __init__(self, config: S3TierConfig, clock: Clock, logger: logging.Logger) -> None:
        super().__init__("", "")
        self._config = config
        self._clock = clock
        self._logger = logger
        self._found: Any = None
        self._is_suspect = False
        self._find_at_s = 0.0

    async def open(self) -> None:
        if self._config.access_key_id is None:
            self._found = await self._find()
            if self._found is None:
                raise TierAuthError(
                    "no credentials: give options 'access_key_id' and 'secret_access_key', or set "
                    "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or fill ~/.aws/credentials"
                )

    async def load_credentials(self) -> CurrentCredentials:
        """Return this object; botocore calls this method when it makes a client."""
        return self

    def suspect(self) -> None:
        """Make the next request search again, because the server refused the credentials."""
        self._is_suspect = True

    async def get_frozen_credentials(self) -> ReadOnlyCredentials:
        config = self._config
        if config.access_key_id is not None and config.secret_access_key is not None:
            token = config.session_token
            return ReadOnlyCredentials(
                config.access_key_id.get_secret_value(),
                config.secret_access_key.get_secret_value(),
                None if token is None else token.get_secret_value(),
            )
        if self._is_suspect and self._clock.now_s() >= self._find_at_s:
            self._is_suspect = False
            self._find_at_s = self._clock.now_s() + _FIND_PAUSE_S
            await self._find_again()
        return await self._found.get_frozen_credentials()

    async def _find(self) -> Any:
        """Return the credentials of a new session, because a session keeps its first result."""
        return await AioSession(profile=self._config.profile).get_credentials()

    async def _find_again(self) -> None:
        try:
            before = await self._found.get_frozen_credentials()
            found = await self._find()
            is_other = found is not None and await found.get_frozen_credentials() != before
        except Exception as error:
            # A file may be half written, or a service unreachable. Keep the old credentials: the
            # server will refuse them again, and its error gives the reason.
            self._logger.debug("no credentials were found: %s", type(error).__name__)
            return
        if is_other:
            self._found = found
            self._logger.warning("the server refused; other credentials were found")
