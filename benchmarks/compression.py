"""Measure how much shorter chunks of KV become, and how fast.

Usage: python benchmarks/compression.py KV [--dtypes bfloat16 ...] [--chunk-kib 2048] [--rounds N]

KV is a directory that benchmarks/kv_sample.py has written. Its files are divided into chunks.

"entropy" is a bound: the ratio if exponents, and signs with mantissas, took the bits of their
entropy in each chunk. zstd (level 1) and lz4 get the shuffled bytes of 16-bit floats: the lower
bytes of all elements, then the upper ones. The shuffling is part of their time.

Speeds are GB of plain bytes in a second of one thread. "encode" and "decode" cycle through all
chunks, which are in memory; with "cached", one chunk stays in the processor's cache. "copy" is
NumPy's copy of a chunk. "NumPy" is kvtier's codec without its compiled part.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from results import Series
from runner import Benchmark, Sample, must_be_equal, positive

from kvtier_sdk.codecs import numpy_planes, planes
from kvtier_sdk.codecs.planes import Planes

#: For each dtype the bytes of an element and the bits of its exponent.
_LAYOUTS = {"bfloat16": (2, 8), "float16": (2, 5), "float8_e4m3fn": (1, 4), "float8_e5m2": (1, 5)}
_ALIGNMENT = 4096
_CACHED_TURNS = 16


class Copies:
    """The plain side, which copies chunks; the others derive from it.

    Attributes:
        stored_bytes: length of each chunk when it was last encoded.
    """

    def __init__(self, dtype: str, chunks: Sequence[np.ndarray]) -> None:
        self.element_bytes, _ = _LAYOUTS[dtype]
        self.chunks = chunks
        self.memories = [np.zeros_like(chunk) for chunk in chunks]
        self.stored_bytes = [len(chunk) for chunk in chunks]

    def encode(self, number: int) -> None:
        self.memories[number][:] = self.chunks[number]

    def decode(self, number: int) -> None:
        self.memories[number][:] = self.chunks[number]

    def ratio(self) -> float:
        """Encode and decode all chunks; exit if the bytes are wrong."""
        for number, chunk in enumerate(self.chunks):
            self.encode(number)
            self.decode(number)
            must_be_equal(np.array_equal(self.memories[number], chunk))
        return sum(map(len, self.chunks)) / sum(self.stored_bytes)


class Coded(Copies):
    def __init__(self, dtype: str, chunks: Sequence[np.ndarray]) -> None:
        super().__init__(dtype, chunks)
        self._planes = Planes(dtype)

    def encode(self, number: int) -> None:
        chunk, memory = memoryview(self.chunks[number]), memoryview(self.memories[number])
        stored_bytes = self._planes.encode(chunk, memory, _ALIGNMENT)
        if not stored_bytes:
            memory[:] = chunk
        self.stored_bytes[number] = stored_bytes or len(chunk)

    def decode(self, number: int) -> None:
        chunk_bytes, memory = len(self.chunks[number]), memoryview(self.memories[number])
        if self.stored_bytes[number] < chunk_bytes:
            self._planes.decode(memory, self.stored_bytes[number], chunk_bytes)


class CodedByNumPy(Coded):
    def encode(self, number: int) -> None:
        with_numpy(partial(super().encode, number))

    def decode(self, number: int) -> None:
        with_numpy(partial(super().decode, number))


def with_numpy(call: Callable[[], None]) -> None:
    compiled, planes.coder = planes.coder, numpy_planes
    try:
        call()
    finally:
        planes.coder = compiled


class Compressed(Copies):
    """A side that shuffles bytes for a general compressor."""

    def __init__(
        self,
        compress: Callable[[memoryview], bytes],
        decompress: Callable[[bytes], bytes],
        dtype: str,
        chunks: Sequence[np.ndarray],
    ) -> None:
        super().__init__(dtype, chunks)
        self._compress, self._decompress = compress, decompress
        self._compressed = [b""] * len(chunks)

    def encode(self, number: int) -> None:
        shuffled = np.ascontiguousarray(self.chunks[number].reshape(-1, self.element_bytes).T)
        self._compressed[number] = self._compress(memoryview(shuffled).cast("B", [shuffled.size]))
        self.stored_bytes[number] = -(-len(self._compressed[number]) // _ALIGNMENT) * _ALIGNMENT

    def decode(self, number: int) -> None:
        shuffled = np.frombuffer(self._decompress(self._compressed[number]), np.uint8)
        memory = self.memories[number].reshape(-1, self.element_bytes)
        memory[:] = shuffled.reshape(self.element_bytes, -1).T


def bound(dtype: str, chunks: Sequence[np.ndarray]) -> float:
    element_bytes, exponent_bits = _LAYOUTS[dtype]
    rest_bits, all_bits = 8 * element_bytes - exponent_bits, (1 << 8 * element_bytes) - 1
    bits = 0.0
    for chunk in chunks:
        elements = chunk.view(f"<u{element_bytes}").astype(np.uint32)
        exponents = (elements << 1 & all_bits) >> rest_bits
        sign = elements >> 8 * element_bytes - 1
        for part in (exponents, elements << 1 & (1 << rest_bits) - 1 | sign):
            counts = np.bincount(part)
            shares = counts[counts > 0] / len(part)
            bits -= len(part) * float(shares @ np.log2(shares))
    return 8 * sum(map(len, chunks)) / bits


def peers(bench: Benchmark) -> dict[str, Callable[..., Compressed]]:
    found = {}
    try:
        import zstandard

        zstd = zstandard.ZstdCompressor(level=1), zstandard.ZstdDecompressor()
        found["zstd"] = partial(Compressed, zstd[0].compress, zstd[1].decompress)
    except ImportError as error:
        bench.absent["zstd"] = str(error)
    try:
        import lz4.frame

        found["lz4"] = partial(Compressed, lz4.frame.compress, lz4.frame.decompress)
    except ImportError as error:
        bench.absent["lz4"] = str(error)
    return found


def turn(side: Copies, number: int) -> Iterator[Sample]:
    """Encode and decode all chunks, and then one chunk several times."""
    everything = range(len(side.chunks))
    yield from timed("encode", side, side.encode, everything)
    yield from timed("decode", side, side.decode, everything)
    one = number % len(side.chunks)
    yield from timed("encode, cached", side, side.encode, [one] * _CACHED_TURNS)
    # Decoding overwrites the coded chunk, so encode it again before each turn.
    samples = []
    for _ in range(_CACHED_TURNS):
        side.encode(one)
        samples.append(list(timed("decode, cached", side, side.decode, [one])))
    for each in zip(*samples, strict=True):
        case, quantity, unit, _ = each[0]
        yield case, quantity, unit, float(np.median([value for *_, value in each]))


def timed(
    case: str, side: Copies, call: Callable[[int], None], numbers: Sequence[int]
) -> Iterator[Sample]:
    size_gb = sum(len(side.chunks[number]) for number in numbers) / 1e9
    began_s, cpu_s = time.perf_counter(), time.thread_time()
    for number in numbers:
        call(number)
    cpu_s, took_s = time.thread_time() - cpu_s, time.perf_counter() - began_s
    yield case, "throughput", "GB/s", size_gb / took_s
    yield case, "CPU", "s/GB", cpu_s / size_gb


def read(file: Path, chunk_bytes: int) -> list[np.ndarray]:
    content = np.fromfile(file, np.uint8)
    return [content[at : at + chunk_bytes] for at in range(0, len(content), chunk_bytes)]


def ratios(
    dtype: str,
    files: Iterable[Path],
    chunk_bytes: int,
    makes: dict[str, Callable[..., Copies]],
) -> Iterator[Series]:
    for file in files:
        layer, part = file.stem.split("-")
        case = f"layer {layer}, {'keys' if part == 'k' else 'values'}"
        chunks = read(file, chunk_bytes)
        found = {name: make(dtype, chunks).ratio() for name, make in makes.items()}
        for name, ratio in (found | {"entropy": bound(dtype, chunks)}).items():
            yield Series(f"{dtype}, length", case, name, "ratio", "", [ratio])


def main() -> None:
    bench = Benchmark(__doc__, rounds=5)
    bench.option("kv", type=Path, metavar="KV")
    bench.option("--dtypes", nargs="+", choices=_LAYOUTS, default=list(_LAYOUTS))
    bench.option("--chunk-kib", type=positive, default=2048)
    options = bench.parse()
    chunk_bytes = options.chunk_kib * 1024
    makes: dict[str, Callable[..., Copies]] = {"kvtier": Coded, **peers(bench)}
    for dtype in options.dtypes:
        files = sorted((options.kv / dtype).glob("*.kv"))
        bench.add(list(ratios(dtype, files, chunk_bytes, makes)), "kvtier")
        chunks = [chunk for file in files for chunk in read(file, chunk_bytes)]
        sides = {
            name: partial(turn, make(dtype, chunks))
            for name, make in {**makes, "NumPy": CodedByNumPy, "copy": Copies}.items()
        }
        bench.measure(f"{dtype}, speed", sides)
    bench.finish()


if __name__ == "__main__":
    main()
