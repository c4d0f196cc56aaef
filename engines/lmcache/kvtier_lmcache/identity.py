"""Translation of LMCache's keys and layouts into kvtier's keys and namespaces."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, NamedTuple

from kvtier_sdk import Namespace, OffloadKey, make_offload_key, split_offload_key

if TYPE_CHECKING:
    from lmcache.v1.distributed.api import ObjectKey

#: The position of the lowest bit of the number of ranks, within LMCache's ``kv_rank``.
_WORLD_SIZE_BIT = 24
_RANK_BYTES = 8
_SALT_BYTES = 16


class ObjectLayout(NamedTuple):
    """The dtypes and shapes of an object's tensors, in order."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    size_bytes: int

    @classmethod
    def of(
        cls, shapes: Sequence[Sequence[int]], dtypes: Sequence[Any], serde: str | None = None
    ) -> ObjectLayout:
        """Return the layout of tensors. A ``serde`` turns each element into one byte."""
        return _layout(tuple(shapes), tuple(dtypes), serde)


@functools.lru_cache(maxsize=1024)
def _layout(
    shapes: tuple[Sequence[int], ...], dtypes: tuple[Any, ...], serde: str | None
) -> ObjectLayout:
    if serde is not None:
        size_bytes = sum(map(math.prod, shapes))
        return ObjectLayout(((serde, (size_bytes,)),), size_bytes)
    tensors = tuple(
        (str(dtype).removeprefix("torch."), tuple(shape))
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
    sizes = (math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))
    return ObjectLayout(tensors, sum(sizes))


def namespace_of(model: str, layout: ObjectLayout, declared: Mapping[str, Any]) -> Namespace:
    release = ".".join(version("lmcache").split(".")[:2])
    tensors = [[dtype, list(shape)] for dtype, shape in layout.tensors]
    # Drop a serde's name, which precedes the dtype, because kvtier's codec needs the bare dtype.
    dtype = ", ".join(sorted({dtype.rpartition(" ")[2] for dtype, _ in layout.tensors}))
    facts = {"engine": f"lmcache {release}", "model": model, "dtype": dtype, "tensors": tensors}
    return Namespace({**declared, **facts})


def offload_key(key: ObjectKey) -> OffloadKey:
    rank = key.kv_rank.to_bytes(_RANK_BYTES, "big")
    return make_offload_key(
        key.chunk_hash + rank + salt_digest(key.cache_salt), key.object_group_id
    )


@functools.lru_cache(maxsize=1024)
def salt_digest(salt: str) -> bytes:
    """Return the digest that replaces a tenant's salt in keys."""
    return hashlib.blake2b(salt.encode(), digest_size=_SALT_BYTES).digest()


def key_parts(key: OffloadKey) -> tuple[bytes, int, bytes, int]:
    """Split a key made by :func:`offload_key` into chunk hash, rank, salt digest and group."""
    joined, group = split_offload_key(key)
    rest, salt = joined[:-_SALT_BYTES], joined[-_SALT_BYTES:]
    return rest[:-_RANK_BYTES], int.from_bytes(rest[-_RANK_BYTES:], "big"), salt, group


def block_of(key: OffloadKey) -> tuple[int, int, int] | None:
    """Return the hash, the group and the number of ranks of an object, as reported to routers.

    The result is ``None`` for a tenant's object, because LMCache's hash does not contain the salt.
    """
    chunk_hash, rank, salt, group = key_parts(key)
    if salt != salt_digest(""):
        return None
    return int.from_bytes(chunk_hash[-8:], "big"), group, rank >> _WORLD_SIZE_BIT & 0xFF
