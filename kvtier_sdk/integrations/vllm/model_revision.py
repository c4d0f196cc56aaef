"""Which model an engine serves, as far as its name, its files and the operator tell.

vLLM tells a connector the model's name, and not the revision that it was asked for.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from kvtier_sdk.errors import ConfigError

#: Where the cache of the hub has a revision of a model.
_SNAPSHOT = re.compile(r"models--(?P<name>[^/]+)/snapshots/(?P<commit>[0-9a-f]{40})$")

_CONFIGS = ("config.json", "params.json")
_INDEXES = ("model.safetensors.index.json", "pytorch_model.bin.index.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
#: What a training leaves beside them, and vLLM does not load either.
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")

#: Of a file of weights, so many pieces at equal distances are read: enough to meet what a training
#: has changed, little enough to be nothing beside loading it.
_PIECES, _PIECE_BYTES = 64, 4096


def model_facts(model: str, hub_cache: Path, revision: str | None = None) -> dict[str, str | None]:
    """Tell a model from all others.

    A path is a fact, unless something else is surer. That is a commit; or the digest of the files
    together with the operator's word, which has to tell apart what samples of weights do not.

    Args:
        model: a directory or a file, or a name on the Hugging Face hub.
        hub_cache: where the hub's files are kept.
        revision: the operator's word for it.

    Returns:
        Facts of a namespace: ``model`` is the name or the path; ``model_revision`` the operator's
        word, or the commit; ``model_files`` a digest of local files, the same wherever they are,
        or the commit where the operator says something else. ``None`` where there is none.

    Raises:
        ConfigError: he says nothing, and the files are not the whole model; or the cache holds no
            revision of it, or several that differ.
    """
    path = Path(model)
    if not path.exists():
        return _facts(model, revision or _commit(model, hub_cache))
    snapshot = _SNAPSHOT.search(path.resolve().as_posix())
    if snapshot and _is_the_hubs(path.resolve()):
        name, commit = snapshot["name"].replace("--", "/"), snapshot["commit"]
        return _facts(name, revision or commit, None if revision in (None, commit) else commit)
    whole = _is_whole(path)
    if not (revision or whole):
        raise _missing(model, "its directory, which has no config or no weights")
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
        "kv_connector_extra_config: option 'model_revision' is missing: which revision of "
        f"{model} is served cannot be told from {files}, and another one's chunks must not be "
        "reused; set it to the commit, or to a name of your own for it"
    )


def _is_whole(model: Path) -> bool:
    """Whether config and weights are here. What is loaded from elsewhere can be anything."""
    if not model.is_dir():
        return _is_weights(model)
    files = [file for file in model.iterdir() if file.is_file()]
    # A file of GGUF is served on its own only: in a directory it is not what is served.
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
    """The model's revisions in the cache that an engine can have been started with."""
    files = (hub_cache / f"models--{model.replace('/', '--')}" / "snapshots").glob("*/*")
    # An engine can have been given the config of another model.
    return sorted({file.parent for file in files if file.name in _CONFIGS or _is_weights(file)})


def _are_one(snapshots: list[Path]) -> bool:
    """Whether all have the same model: the cache keeps equal files once, and links to them."""
    first, *others = [_files(snapshot, _CONFIGS + _WEIGHTS) for snapshot in snapshots]
    return all(map(_is_whole, snapshots)) and all(other == first for other in others)


def _is_the_hubs(snapshot: Path) -> bool:
    """Whether the whole model is as the hub's client has loaded it: links to blobs only."""
    blobs = snapshot.parent.parent / "blobs"
    files = _files(snapshot, _CONFIGS + _WEIGHTS)
    return _is_whole(snapshot) and all(file.parent == blobs for _, file in files)


def _files(snapshot: Path, endings: tuple[str, ...]) -> set[tuple[str, Path]]:
    return {
        (file.name, file.resolve()) for file in snapshot.iterdir() if file.name.endswith(endings)
    }
