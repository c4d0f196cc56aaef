"""Which revision of a model an engine serves, as far as the files of the model tell.

vLLM tells a connector the model's name, and not the revision that it was asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from kvtier_sdk.errors import ConfigError

_CONFIGS = ("config.json", "params.json")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")

#: Of a file of weights, so many pieces at equal distances are read: enough to meet what a training
#: has changed, little enough to be nothing beside loading it.
_PIECES, _PIECE_BYTES = 64, 4096


def find_revision(model: str, hub_cache: Path) -> str:
    """Tell a model from others of its name.

    Args:
        model: a directory or a file, or a name on the Hugging Face hub.
        hub_cache: where the hub's files are kept.

    Returns:
        Of local files, a digest: the same wherever the same files are. Else the commit.

    Raises:
        ConfigError: the cache holds no revision of the model, or several that differ.
    """
    path = Path(model)
    if path.exists():
        return _digest(path)
    snapshots = _snapshots(model, hub_cache)
    if not snapshots or not _are_one(snapshots):
        found = ", ".join(snapshot.name for snapshot in snapshots) or "none"
        raise ConfigError(
            "kv_connector_extra_config: option 'model_revision' is missing: which revision of "
            f"{model} is served cannot be told from {hub_cache} (there: {found}), and another "
            "one's chunks must not be reused; set it to the commit, or to a name of your own for it"
        )
    return snapshots[0].name


def _digest(model: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(model.iterdir()) if model.is_dir() else [model]:
        if not file.is_file():
            continue
        if file.name in _CONFIGS + _INDEXES:
            _add(digest, file.name, file.read_bytes())
        elif file.suffix in _WEIGHTS:
            _add(digest, file.name, f"{file.stat().st_size}".encode(), *_pieces(file))
    return digest.hexdigest()[:16]


def _add(digest: hashlib._Hash, *parts: str | bytes) -> None:
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)


def _pieces(file: Path) -> Iterator[bytes]:
    size_bytes = file.stat().st_size
    with file.open("rb") as data:
        for index in range(_PIECES):
            data.seek(size_bytes * index // _PIECES)
            yield data.read(_PIECE_BYTES)


def _snapshots(model: str, hub_cache: Path) -> list[Path]:
    """The model's revisions in the cache that an engine can have been started with."""
    folder = hub_cache / f"models--{model.replace('/', '--')}" / "snapshots"
    return sorted({file.parent for name in _CONFIGS for file in folder.glob(f"*/{name}")})


def _are_one(snapshots: list[Path]) -> bool:
    """Whether all have the same model: the cache keeps equal files once, and links to them."""
    first, *others = [
        (_files(snapshot, _CONFIGS), _files(snapshot, _WEIGHTS)) for snapshot in snapshots
    ]
    # Without weights there they are kept elsewhere, and may differ.
    return not others or (bool(first[1]) and all(other == first for other in others))


def _files(snapshot: Path, endings: tuple[str, ...]) -> set[tuple[str, Path]]:
    return {
        (file.name, file.resolve()) for file in snapshot.iterdir() if file.name.endswith(endings)
    }
