"""The saved inputs: a text file for each target, with one input in base64 per line."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from functools import cache
from pathlib import Path

CORPUS = Path(__file__).parents[2] / "fuzz" / "corpus"


@cache
def read_corpus(target: str) -> list[bytes]:
    path = CORPUS / f"{target}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [base64.b64decode(line) for line in lines]


def write_corpus(target: str, inputs: Iterable[bytes]) -> None:
    lines = [
        base64.b64encode(data).decode()
        for data in sorted(set(inputs), key=lambda data: (len(data), data))
    ]
    CORPUS.mkdir(exist_ok=True)
    (CORPUS / f"{target}.txt").write_text("".join(f"{line}\n" for line in lines))
