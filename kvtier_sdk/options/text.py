"""Text that others wrote, for terminals and logs."""

from __future__ import annotations


def one_line(text: str) -> str:
    """Escape what is not printable, so that text moves no cursor and begins no line of its own.

    A store's names, facts and errors, and an engine's answers, may hold anything.

    >>> print(one_line("llama\\x1b[2K\\rDelete them?"))
    llama\\x1b[2K\\rDelete them?
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
