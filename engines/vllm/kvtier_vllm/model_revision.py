"""Identifies the model that an engine serves, by its name, its files or an option.

vLLM passes the model's name to a connector, but not the requested revision.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from kvtier_sdk import ConfigError

#: The path of a model's revision in the cache of the Hugging Face hub.
_SNAPSHOT = re.compile(r"models--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")

_CONFIGS = ("config.json", "params.json")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
#: Files that training leaves beside the weights. vLLM does not load them.
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")

#: Number and size of the evenly spaced samples that are read from a weights file. They
#: suffice to detect retrained weights, and reading them is far faster than reading the file.
_PIECES, _PIECE_BYTES = 64, 4096


def model_facts(model: str, hub_cache: Path, revision: str | None = None) -> dict[str, str | None]:
    """Return facts that identify a model, with its path only if revision or files are unknown."""
    path = Path(model)
    if not path.exists():
        return _facts(model, revision or _commit(model, hub_cache))
    snapshot = _SNAPSHOT.search(path.resolve().as_posix())
    if snapshot and _is_the_hubs(path.resolve()):
        name, commit = snapshot["name"].replace("--", "/"), snapshot["commit"]
        return _facts(name, revision or commit, None if revision in (None, commit) else commit)
    whole = _is_whole(path)
    if not (revision or whole):
        raise _missing(model, "its directory, which lacks config or weights")
    return _facts(None if revision and whole else model, revision, _digest(path))


def _facts(
    model: str | None, revision: str | None, files: str | None = None
) -> dict[str, str | None]:
    return {"model": model, "model_revision": revision, "model_files": files}


def _commit(model: str, hub_cache: Path) -> str:
    snapshots = _snapshots(model, hub_cache)
    if not snapshots or not _are_one(snapshots):
        found = ", ".join(
            snapshot.name if _is_whole(snapshot) else f"{snapshot.name} without config or weights"
            for snapshot in snapshots
        )
        raise _missing(model, f"{hub_cache} (there: {found or 'none'})")
    return snapshots[0].name


def _missing(model: str, files: str) -> ConfigError:
    return ConfigError(
        "kv_connector_extra_config: option 'model_revision' is missing: the revision of "
        f"{model} cannot be determined from {files}, and the chunks of another revision must not "
        "be reused; set it to the commit, or to a name of your choice for the revision"
    )


def _is_whole(model: Path) -> bool:
    """Return true for a weights file, and for a directory with a config and weights."""
    if not model.is_dir():
        return _is_weights(model)
    files = [file for file in model.iterdir() if file.is_file()]
    # vLLM serves a GGUF file only by its own path, never as part of a directory.
    return any(file.name in _CONFIGS for file in files) and any(
        _is_weights(file) and file.suffix != ".gguf" for file in files
    )


def _is_weights(file: Path) -> bool:
    return file.suffix in _WEIGHTS and file.name not in _NOT_WEIGHTS


def _digest(model: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(model.iterdir()) if model.is_dir() else [model]:
        if not file.is_file():
            continue
        if file.name in _CONFIGS + _INDEXES:
            _add(digest, file.name, file.read_bytes())
        elif _is_weights(file):
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
    """Return the cached revisions of a model that the engine may be serving."""
    files = (hub_cache / f"models--{model.replace('/', '--')}" / "snapshots").glob("*/*")
    # A revision without a config counts too, because its config may come from another model.
    return sorted({file.parent for file in files if file.name in _CONFIGS or _is_weights(file)})


def _are_one(snapshots: list[Path]) -> bool:
    """Return true if all snapshots are complete and link to the same blobs."""
    first, *others = [_files(snapshot, _CONFIGS + _WEIGHTS) for snapshot in snapshots]
    return all(map(_is_whole, snapshots)) and all(other == first for other in others)


def _is_the_hubs(snapshot: Path) -> bool:
    """Return true if config and weights are links to blobs, as the hub's client creates them."""
    blobs = snapshot.parent.parent / "blobs"
    files = _files(snapshot, _CONFIGS + _WEIGHTS)
    return _is_whole(snapshot) and all(file.parent == blobs for _, file in files)


def _files(snapshot: Path, endings: tuple[str, ...]) -> set[tuple[str, Path]]:
    return {
        (file.name, file.resolve()) for file in snapshot.iterdir() if file.name.endswith(endings)
    }
