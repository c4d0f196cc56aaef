"""The triton kernel that copies pages between KV tensors and a staging part.

Only :mod:`kvtier_sdk.worker.gather` imports this module, and only when it gathers, because triton
may be missing. With ``TRITON_INTERPRET=1`` the kernel runs on CPU tensors.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

#: Words of 8 bytes that a program copies at a time. One access covers two words.
_TILE_WORDS = 1024
#: Number of programs in a launch. They copy several times as fast as a link, but leave most of the
#: device to the engine: each of an H100's 132 multiprocessors runs many programs.
_PROGRAMS = 64


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "staging",
        "first_entry",
        "entries",
        "first_segment",
        "segments",
        "per_chunk",
        "chunk_words",
    ]
)
def _copy_pages(  # type: ignore[no-untyped-def]
    staging,
    block_ids,
    table,
    first_entry,
    entries,
    first_segment,
    segments,
    per_chunk,
    chunk_words,
    GATHER: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    lanes = tl.arange(0, TILE)
    begin = tl.load(table + 4 * first_segment + 3)
    for unit in range(tl.program_id(0), entries * segments, tl.num_programs(0)):
        entry = unit // segments
        row = table + 4 * (first_segment + unit % segments)
        block = tl.load(block_ids + first_entry + entry)
        if block >= 0:
            # Tell the compiler that addresses and lengths are multiples of 16 bytes.
            words = tl.multiple_of(tl.load(row + 2), 2)
            page = tl.load(row) + block * tl.load(row + 1)
            page = tl.multiple_of(page.to(tl.pointer_type(tl.int64)), 16)
            in_chunk = tl.load(row + 3) - begin + entry % per_chunk * words
            place = staging + 8 * (entry // per_chunk * chunk_words + in_chunk)
            place = tl.multiple_of(place.to(tl.pointer_type(tl.int64)), 16)
            for at in range(0, words, TILE):
                inside = at + lanes < words
                if GATHER:
                    found = tl.load(page + at + lanes, mask=inside)
                    tl.store(place + at + lanes, found, mask=inside)
                else:
                    found = tl.load(place + at + lanes, mask=inside)
                    tl.store(page + at + lanes, found, mask=inside)


def launch(*arguments: Any, gather: bool) -> None:
    _copy_pages[(_PROGRAMS,)](*arguments, GATHER=gather, TILE=_TILE_WORDS)
