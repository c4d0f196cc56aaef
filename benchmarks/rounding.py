"""Measure what a model predicts from a KV cache that was rounded to 8 bits.

Usage: python benchmarks/rounding.py KV [--windows 64] [--magnitudes 1 0.0078125 128] [--json FILE]

KV is a directory that benchmarks/kv_sample.py has written. Its model reads 128 bytes of a text that
it has not learned from, and its KV of them goes in bfloat16 through a coder. From that KV it
predicts the next 128 bytes, given those before each. "exact" is the KV in bfloat16.

"change" is the absolute change of the log-probability of the text's next byte, in thousandths of a
nat. "other choice" is the share of bytes for which another byte than before is the likeliest.

With a magnitude, the coder gets KV multiplied by it, as of a model with such keys and values, and
the model gets the decoded KV divided by it. "lmcache" is LMCache's fp8 serde.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import torch
from kv_sample import Model, texts
from results import Series
from runner import Benchmark, positive
from torch import Tensor
from torch.nn import functional

from kvtier_sdk.codecs.float8 import Float8
from kvtier_sdk.codecs.planes import Planes

_PREFIX = 128
_ALIGNMENT = 4096

Coder = Callable[[Tensor], Tensor]


def kvtier(rows: Tensor) -> Tensor:
    return coded(Float8("bfloat16"), rows)


def exactly(rows: Tensor) -> Tensor:
    return coded(Planes("bfloat16"), rows)


def coded(coder: Planes, rows: Tensor) -> Tensor:
    plain = memoryview(rows.contiguous().view(torch.uint8).numpy()).cast("B")
    memory = memoryview(bytearray(len(plain)))
    stored_bytes = coder.encode(plain, memory, _ALIGNMENT)
    if not stored_bytes:
        return rows
    coder.decode(memory, stored_bytes, len(plain))
    return torch.frombuffer(memory, dtype=rows.dtype).view(rows.shape)


def lmcache() -> Coder:
    from lmcache.v1.distributed.serde.fp8 import (
        Fp8QuantizationDeserializer,
        Fp8QuantizationSerializer,
    )

    writer, reader = Fp8QuantizationSerializer(), Fp8QuantizationDeserializer()

    def code(rows: Tensor) -> Tensor:
        stored = SimpleNamespace(tensor=torch.empty(rows.numel(), dtype=torch.uint8))
        back = SimpleNamespace(tensor=torch.empty_like(rows))
        writer.serialize(SimpleNamespace(tensor=rows), stored, None)
        reader.deserialize(stored, back, None)
        return back.tensor

    return code


def predict(
    model: Model, kv: Sequence[Sequence[Tensor]], windows: Tensor, code: Coder, magnitude: float
) -> Tensor:
    """Return the log-probabilities of each byte after the prefix of each window."""
    for block, rows in zip(model.blocks, kv, strict=True):
        scaled = [(of * magnitude).to(torch.bfloat16) for of in rows]
        block.attention.past = tuple(code(of).float() / magnitude for of in scaled)
    return functional.log_softmax(model(windows[:, _PREFIX:-1], _PREFIX), dim=-1)


def changes(exact: Tensor, found: Tensor, text: Tensor) -> Iterator[tuple[str, str, float]]:
    change = (found - exact).gather(-1, text[..., None]).abs()
    yield "mean change", "mnat", 1000 * change.mean().item()
    yield "largest change", "mnat", 1000 * change.max().item()
    yield "other choice", "%", 100 * (found.argmax(-1) != exact.argmax(-1)).float().mean().item()


def main() -> None:
    bench = Benchmark(__doc__)
    bench.option("kv", type=Path, metavar="KV")
    bench.option("--windows", type=positive, default=64)
    bench.option("--magnitudes", nargs="+", type=float, default=[1.0, 2.0**-7, 2.0**7])
    options = bench.parse()
    weights = torch.load(options.kv / "model.pt")
    model = Model(len({name.split(".")[1] for name in weights if name.startswith("blocks.")}))
    model.load_state_dict(weights)
    size = 2 * _PREFIX
    windows = texts()[1].unfold(0, size + 1, size)[: options.windows].long()
    coders: dict[str, Coder] = {"kvtier": kvtier, "kvtier, exact": exactly}
    try:
        coders["lmcache"] = lmcache()
    except ImportError as error:
        bench.absent["lmcache"] = str(error)
    with torch.no_grad():
        model(windows[:, :_PREFIX])
        kv = [block.attention.kv for block in model.blocks]
        exact = predict(model, kv, windows, lambda rows: rows, 1.0)
        for magnitude in options.magnitudes:
            case = f"KV times {magnitude:g}"
            bits = -exact.gather(-1, windows[:, _PREFIX + 1 :, None]).mean().item() / math.log(2)
            found = [Series("Rounding", case, "exact", "bits a byte", "", [bits])]
            for name, code in coders.items():
                after = predict(model, kv, windows, code, magnitude)
                for quantity, unit, value in changes(exact, after, windows[:, _PREFIX + 1 :]):
                    found.append(Series("Rounding", case, name, quantity, unit, [value]))
            bench.add(found)
    bench.finish()


if __name__ == "__main__":
    main()
