"""Write the KV of a small language model, which this program trains before.

Usage: python benchmarks/kv_sample.py DIRECTORY [--minutes 4] [--layers 6] [--tokens 8192]

The model is a transformer with rotary positions, RMSNorm and a gated MLP, as most models that are
served today. It learns to predict the bytes of Python's standard library, which every machine has.
KV is what the model computes for modules that it has not learned from.

DIRECTORY gets one file for each dtype, layer and part: ``bfloat16/3-k.kv`` has the keys of layer 3
after the rotation, as an engine caches them: a token is a row of all heads. ``model.pt`` has the
model, for benchmarks/rounding.py.
"""

from __future__ import annotations

import argparse
import math
import sysconfig
import time
from pathlib import Path

import torch
from runner import positive
from torch import Tensor, nn
from torch.nn import functional

DTYPES = ("bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
_CONTEXT = 256
_WIDTH = 256
_HEADS = 4
_BATCH = 2
_HELD_OUT = 20


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(_WIDTH, 3 * _WIDTH, bias=False)
        self.out = nn.Linear(_WIDTH, _WIDTH, bias=False)
        #: The keys and values of the last call: tokens, then heads and their channels.
        self.kv: tuple[Tensor, Tensor] | None = None
        #: The keys and values of earlier tokens, in the same form.
        self.past: tuple[Tensor, Tensor] | None = None

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        batch, tokens, _ = hidden.shape
        heads = self.qkv(hidden).view(batch, tokens, 3, _HEADS, -1).permute(2, 0, 3, 1, 4)
        query, key, value = rotate(heads[0], rotation), rotate(heads[1], rotation), heads[2]
        rows = [each.transpose(1, 2).reshape(-1, _WIDTH).detach() for each in (key, value)]
        self.kv = rows[0], rows[1]
        if self.past is not None:
            past = [of.view(batch, -1, _HEADS, query.shape[-1]).transpose(1, 2) for of in self.past]
            key, value = torch.cat([past[0], key], dim=2), torch.cat([past[1], value], dim=2)
        seen = torch.ones(tokens, key.shape[2], dtype=torch.bool).tril(key.shape[2] - tokens)
        mixed = functional.scaled_dot_product_attention(query, key, value, attn_mask=seen)
        return self.out(mixed.transpose(1, 2).reshape(batch, tokens, _WIDTH))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(), nn.RMSNorm(_WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(2 * _WIDTH, _WIDTH)
        self.mlp_norm = nn.RMSNorm(_WIDTH)

    def forward(self, hidden: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), rotation)
        gate, up = self.up(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return hidden + self.down(functional.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(_WIDTH), nn.Linear(_WIDTH, 256, bias=False)

    def forward(self, text: Tensor, earlier: int = 0) -> Tensor:
        hidden, rotation = self.embedding(text), angles(earlier, text.shape[1])
        for block in self.blocks:
            hidden = block(hidden, rotation)
        return self.head(self.norm(hidden))


def angles(earlier: int, tokens: int) -> tuple[Tensor, Tensor]:
    half = _WIDTH // _HEADS // 2
    turns = torch.outer(
        torch.arange(earlier, earlier + tokens), 10_000.0 ** -(torch.arange(half) / half)
    )
    return turns.cos(), turns.sin()


def rotate(heads: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    (cos, sin), (first, second) = rotation, heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def texts() -> tuple[Tensor, Tensor]:
    """Return the text to learn from, and the text of every 20th module."""
    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for number, module in enumerate(modules):
        parts[number % _HELD_OUT == 0].append(module.read_bytes())
    learned, held_out = (
        torch.frombuffer(bytearray(b"".join(of)), dtype=torch.uint8) for of in parts
    )
    return learned, held_out


def train(model: Model, text: Tensor, minutes: float) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1, betas=(0.9, 0.95))
    began_s, step = time.monotonic(), 0
    while (share := (time.monotonic() - began_s) / (minutes * 60)) < 1:
        for group in optimizer.param_groups:
            # Warm up, then fall to a tenth.
            rate = 0.55 + 0.45 * math.cos(math.pi * share)
            group["lr"] = 1e-3 * min(1.0, (step + 1) / 50) * rate
        starts = torch.randint(len(text) - _CONTEXT - 1, (_BATCH,)).tolist()
        windows = torch.stack([text[start : start + _CONTEXT + 1] for start in starts]).long()
        loss = loss_of(model, windows)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0:
            print(f"step {step}: {loss.item() / math.log(2):.2f} bits a byte", flush=True)


def loss_of(model: Model, windows: Tensor) -> Tensor:
    return functional.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def write(model: Model, text: Tensor, tokens: int, directory: Path) -> None:
    windows = text[: tokens + 1].unfold(0, _CONTEXT + 1, _CONTEXT).long()
    with torch.no_grad():
        print(f"text not seen: {loss_of(model, windows).item() / math.log(2):.2f} bits a byte")
    for dtype in DTYPES:
        (directory / dtype).mkdir(parents=True, exist_ok=True)
        for layer, block in enumerate(model.blocks):
            for part, rows in zip("kv", block.attention.kv, strict=True):
                kept = rows.to(getattr(torch, dtype)).contiguous().view(torch.uint8)
                (directory / dtype / f"{layer}-{part}.kv").write_bytes(kept.numpy().tobytes())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--minutes", type=float, default=4.0, help="of training")
    parser.add_argument("--layers", type=positive, default=6)
    parser.add_argument("--tokens", type=positive, default=8192, help="whose KV is written")
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Model(options.layers)
    learned, held_out = texts()
    count = sum(each.numel() for each in model.parameters())
    print(f"{count:,} parameters; {len(learned):,} bytes to learn from, {len(held_out):,} held out")
    train(model, learned, options.minutes)
    options.directory.mkdir(parents=True, exist_ok=True)
    torch.save(model.state_dict(), options.directory / "model.pt")
    write(model, held_out, options.tokens, options.directory)


if __name__ == "__main__":
    main()
