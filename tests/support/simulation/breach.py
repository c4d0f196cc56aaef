"""The error for a broken rule, and the journal that the error quotes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

_LAST_ACTIONS = 30


class Breach(AssertionError):  # noqa: N818  # the usual word for a broken rule
    def __init__(self, rule: str, message: str) -> None:
        super().__init__(rule, message)
        self.rule = rule
        self.message = message
        self.seed: int | None = None
        self.step = 0
        self.actions: list[str] = []

    def __reduce__(self) -> tuple[type[Breach], tuple[str, str], dict[str, Any]]:
        return type(self), (self.rule, self.message), dict(self.__dict__)

    def __str__(self) -> str:
        seed = "" if self.seed is None else f"seed {self.seed}, step {self.step}: "
        return f"{seed}{self.rule}: {self.message}"

    def story(self) -> str:
        again = (
            f"see it again: make soak SEED={self.seed}, or with every action: "
            f"python -m support.simulation --seed {self.seed} --trace"
        )
        return "\n".join([*self.actions, f"BREACH: {self}", again])


class Journal:
    """Keeps a simulation's last actions, and formats them only on demand."""

    def __init__(
        self, now_s: Callable[[], float], echo: Callable[[str], None] | None = None
    ) -> None:
        self.step = 0
        self._now_s = now_s
        self._echo = echo
        self._last: deque[tuple[int, float, tuple[object, ...]]] = deque(maxlen=_LAST_ACTIONS)

    def note(self, *words: object) -> None:
        entry = self.step, self._now_s(), words
        self._last.append(entry)
        if self._echo is not None:
            self._echo(_in_words(entry))

    def last(self) -> list[str]:
        return [_in_words(entry) for entry in self._last]


def short(key: bytes) -> str:
    return f"{key[:3].hex()}.{int.from_bytes(key[-4:], 'big')}"


def _in_words(entry: tuple[int, float, tuple[object, ...]]) -> str:
    step, now_s, words = entry
    return f"step {step:3} at {now_s:8.4f} s: " + " ".join(map(_word, words))


def _word(word: object) -> str:
    if isinstance(word, bytes):
        return short(word)
    if isinstance(word, list | tuple | set | frozenset):
        return "[" + " ".join(map(_word, word)) + "]"
    return str(word)
