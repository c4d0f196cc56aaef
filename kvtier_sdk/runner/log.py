"""A tier's log, which names the tier in every line and counts repeated messages."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from kvtier_sdk.aio.clock import Clock, TimerHandle
from kvtier_sdk.options.place import one_line
from kvtier_sdk.options.secrets import Secrets, make_loggable, masked_error

#: For this time after a logged message, further messages of the same topic are only counted.
QUIET_S = 60.0


@dataclass(slots=True)
class _Topic:
    logged_s: float
    level: int
    message: str = ""
    message_s: float = 0.0
    unsaid: int = 0
    timer: TimerHandle | None = None


class TierLog(logging.LoggerAdapter[logging.Logger]):
    """Prefixes each message with the tier's name, and counts repeated messages."""

    def __init__(self, name: str, clock: Clock, secrets: Secrets | None = None) -> None:
        super().__init__(logging.getLogger(f"kvtier.tier.{name}"))
        known = [one for one in self.logger.filters if isinstance(one, _TierFilter)]
        filter_ = known[0] if known else _TierFilter()
        self.logger.addFilter(filter_)
        if secrets is not None:
            filter_.secrets.add(secrets)
        self.tier = name
        self._clock = clock
        self._topics: dict[str, _Topic] = {}

    def process(
        self, msg: Any, kwargs: MutableMapping[str, Any]
    ) -> tuple[Any, MutableMapping[str, Any]]:
        return f"{self.tier}: {msg}", kwargs

    def often(self, level: int, topic: str, message: str, *, ends_outage: bool = False) -> None:
        """Log a message, at most once a minute per ``topic``.

        Further messages are held back and counted. A timer logs the last one and the count; without
        an event loop, the first message after the minute triggers this. If ``ends_outage`` is true,
        the messages held back for all topics are logged first.
        """
        now_s = self._clock.now_s()
        known = self._topics.get(topic)
        if known is None or (not known.unsaid and now_s - known.logged_s >= QUIET_S):
            if ends_outage:
                self.say_held_back()
            self._topics[topic] = _Topic(now_s, level)
            self.logger.log(level, "%s", message)
            return
        known.level, known.message, known.message_s = level, message, now_s
        known.unsaid += 1
        if now_s - known.logged_s >= QUIET_S:
            self._say(known)
        elif known.timer is None:
            with contextlib.suppress(RuntimeError):  # no event loop runs in this thread
                known.timer = self._clock.call_at(known.logged_s + QUIET_S, self._say, known)

    def catch_up(self) -> None:
        """Log the messages held back, and forget all topics."""
        self.say_held_back()
        self._topics.clear()

    def say_held_back(self) -> None:
        held = [topic for topic in self._topics.values() if topic.unsaid]
        for topic in sorted(held, key=lambda topic: topic.message_s):
            if topic.timer is not None:
                topic.timer.cancel()
            self._say(topic)

    def _say(self, topic: _Topic) -> None:
        now_s = self._clock.now_s()
        facts = []
        if topic.unsaid > 1:
            facts.append(f"{topic.unsaid} of this kind in {now_s - topic.logged_s:.0f} s")
        if age_s := round(now_s - topic.message_s):
            facts.append(f"{'the last ' * (topic.unsaid > 1)}{age_s} s ago")
        self.logger.log(
            topic.level, "%s%s", topic.message, f" ({', '.join(facts)})" if facts else ""
        )
        topic.logged_s, topic.unsaid, topic.timer = now_s, 0, None


class _TierFilter(logging.Filter):
    def __init__(self) -> None:
        super().__init__()
        # Use weak references, because a logger must not keep a closed tier's secrets in memory.
        self.secrets: WeakSet[Secrets] = WeakSet()

    def filter(self, record: logging.LogRecord) -> bool:
        make_loggable(record)
        text = shown = record.getMessage()
        error = record.exc_info[1] if record.exc_info else None
        for secrets in self.secrets:
            shown = secrets.mask(shown)
            if error is not None:
                error = masked_error(error, secrets)
        # Indent all lines after the first, so that a store's text cannot imitate a log record.
        shown = "\n  ".join(map(one_line, shown.split("\n")))
        if shown != text:
            record.msg, record.args = shown, ()
        if error is not None:
            record.exc_info = type(error), error, error.__traceback__
            # Handlers write this text instead of formatting the exception themselves.
            lines = "".join(traceback.format_exception(error)).rstrip().split("\n")
            record.exc_text = "\n".join(map(one_line, lines))
        return True
