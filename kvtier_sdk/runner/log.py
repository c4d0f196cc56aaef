"""A tier's log: every line names the tier, and nothing is said a thousand times."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from kvtier_sdk.aio.clock import Clock

#: How long a message that may come often is only counted after it was logged.
QUIET_S = 10.0


@dataclass(slots=True)
class _Topic:
    """A kind of message that may come often."""

    logged_s: float
    level: int
    message: str = ""
    unsaid: int = 0


class TierLog(logging.LoggerAdapter[logging.Logger]):
    """Puts the tier's name in front of each message, and counts what repeats itself.

    Attributes:
        tier: the tier's name.

    Args:
        name: the tier's; the logger is ``kvtier.tier.NAME``.
        clock: time.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        super().__init__(logging.getLogger(f"kvtier.tier.{name}"))
        self.tier = name
        self._clock = clock
        self._topics: dict[str, _Topic] = {}

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        """Name the tier."""
        return f"{self.tier}: {msg}", kwargs

    def often(self, level: int, topic: str, message: str) -> None:
        """Log what may come often: at once, and then with how many like it came meanwhile.

        Args:
            level: of :mod:`logging`.
            topic: what counts as alike.
            message: names the tier itself, as errors of tiers do.
        """
        now_s = self._clock.now_s()
        known = self._topics.get(topic)
        if known is None:
            self._topics[topic] = _Topic(now_s, level)
            self.logger.log(level, "%s", message)
            return
        known.level, known.message = level, message
        known.unsaid += 1
        if now_s - known.logged_s >= QUIET_S:
            self._catch_up(known)
            known.logged_s = now_s

    def catch_up(self) -> None:
        """Log what was only counted; for the end."""
        for topic in self._topics.values():
            if topic.unsaid:
                self._catch_up(topic)
        self._topics.clear()

    def _catch_up(self, topic: _Topic) -> None:
        more = f" ({topic.unsaid} of this kind since the last)" if topic.unsaid > 1 else ""
        self.logger.log(topic.level, "%s%s", topic.message, more)
        topic.unsaid = 0
