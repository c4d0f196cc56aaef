import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvtier_sdk import ConfigError
from kvtier_vllm.model_revision import model_facts

WEIGHTS = np.random.default_rng(1).integers(0, 256, 3 * 2**20, dtype=np.uint8)
NAME = "acme/llama"
MAIN, OTHER = "a" * 40, "b" * 40


def make_model(folder: Path, weights: bytes = WEIGHTS.tobytes()) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    index = {"weight_map": {"w": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model-00001-of-00001.safetensors").write_bytes(weights)
    return folder


def digest_of(model: Path) -> str | None:
    return model_facts(str(model), model.parent / "hub")["model_files"]


def test_it_is_the_same_wherever_the_files_are_and_whatever_is_beside(tmp_path: Path) -> None:
    first = digest_of(make_model(tmp_path / "one"))
    other = make_model(tmp_path / "other")
    (other / "README.md").write_text("about it")
    (other / "original").mkdir()
    assert digest_of(other) == first


def train(share: float) -> Callable[[Path], object]:
    def change(model: Path) -> None:
        trained = WEIGHTS.copy()
        start = int(share * len(WEIGHTS))
        trained[start : start + len(WEIGHTS) // 10] ^= 1
        (model / "model-00001-of-00001.safetensors").write_bytes(trained.tobytes())

    return change


@pytest.mark.parametrize(
    "change",
    [
        train(0),
        train(0.5),
        train(0.9),
        lambda model: os.truncate(model / "model-00001-of-00001.safetensors", 2**20),
        lambda model: (model / "config.json").write_text('{"rope_theta": 1}'),
    ],
    ids=["head", "middle", "tail", "length", "config"],
)
def test_new_content_is_a_new_revision(tmp_path: Path, change: Callable[[Path], object]) -> None:
    one, other = make_model(tmp_path / "one"), make_model(tmp_path / "other")
    change(other)
    link = tmp_path / "current"
    link.symlink_to(other)
    assert len({digest_of(one), digest_of(link)}) == 2


@pytest.mark.parametrize("name", ["a.gguf", "model.tensors"])
def test_weights_of_other_kinds_tell_a_model(tmp_path: Path, name: str) -> None:
    revisions = set()
    for folder, weights in ((tmp_path / "one", b"1"), (tmp_path / "other", b"2")):
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        (folder / name).write_bytes(weights)
        # For a GGUF model, vLLM gets the path of the file, not of its directory.
        revisions.add(digest_of(folder / name if name == "a.gguf" else folder))
    assert len(revisions) == 2


@pytest.mark.parametrize("lacking", ["config.json", "model-00001-of-00001.safetensors"])
def test_a_directory_without_config_or_weights_needs_a_name(tmp_path: Path, lacking: str) -> None:
    model = make_model(tmp_path / "model_streamer")
    (model / lacking).unlink()
    # No engine loads these files from a directory.
    for name in ("training_args.bin", "model.gguf"):
        (model / name).write_text("of a training")
    with pytest.raises(
        ConfigError, match=r"option 'model_revision' is missing: .*lacks config or weights"
    ):
        model_facts(str(model), tmp_path)


class Cache:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._repository = folder / "models--acme--llama"

    def hold(self, commit: str, **blobs: str) -> Path:
        snapshot = self._repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        store = self._repository / "blobs"
        store.mkdir(exist_ok=True)
        for name, content in blobs.items():
            (store / content).write_text(content)
            (snapshot / name.replace("_", ".")).symlink_to(store / content)
        return snapshot

    def revision(self) -> str | None:
        return self.facts(NAME)["model_revision"]

    def facts(self, model: str | Path, revision: str | None = None) -> dict[str, str | None]:
        return model_facts(str(model), self.folder, revision)


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "hub")


def test_the_only_revision_of_the_cache_whatever_it_is_called(cache: Cache) -> None:
    cache.hold(OTHER, config_json="c", model_safetensors="w")
    # The cache has only the tokenizer of ``MAIN``, so no engine can serve that revision.
    cache.hold(MAIN, tokenizer_json="t")
    assert cache.revision() == OTHER


def test_revisions_of_one_model_are_one(cache: Cache) -> None:
    for commit, page in ((MAIN, "first"), (OTHER, "second")):
        cache.hold(commit, config_json="c", model_safetensors="w", README_md=page)
    assert cache.revision() == MAIN


@pytest.mark.parametrize(
    "other",
    [
        {"config_json": "c", "model_safetensors": "trained"},
        {"config_json": "rope", "model_safetensors": "w"},
    ],
)
def test_several_that_differ_need_a_choice(cache: Cache, other: dict[str, str]) -> None:
    cache.hold(MAIN, config_json="c", model_safetensors="w")
    cache.hold(OTHER, **other)
    with pytest.raises(ConfigError, match=r"option 'model_revision' is missing") as error:
        cache.revision()
    assert f"(there: {MAIN}, {OTHER})" in str(error.value)


@pytest.mark.parametrize("part", [{"config_json": "c"}, {"model_safetensors": "w"}])
@pytest.mark.parametrize("beside", [{}, {"config_json": "c", "model_safetensors": "w"}])
def test_a_part_needs_a_choice(cache: Cache, part: dict[str, str], beside: dict[str, str]) -> None:
    cache.hold(MAIN, **part)
    if beside:
        cache.hold(OTHER, **beside)
    with pytest.raises(ConfigError, match=f"{MAIN} without config or weights"):
        cache.revision()


def test_a_model_that_the_cache_does_not_know(cache: Cache) -> None:
    with pytest.raises(ConfigError, match=r"\(there: none\)"):
        cache.revision()


def test_a_snapshot_that_is_given_by_its_path_is_known_by_name_and_commit(cache: Cache) -> None:
    snapshot = cache.hold(MAIN, config_json="c", model_safetensors="w")
    link = cache.folder.with_name("current")
    link.symlink_to(snapshot)
    for revision in (None, MAIN):
        assert cache.facts(snapshot, revision) == cache.facts(NAME, revision)
        assert cache.facts(link, revision) == cache.facts(NAME)


def test_a_snapshot_is_not_known_by_the_operators_word_alone(cache: Cache) -> None:
    snapshots = [
        cache.hold(commit, config_json="c", model_safetensors=commit) for commit in (MAIN, OTHER)
    ]
    one, other = (cache.facts(snapshot, "ours") for snapshot in snapshots)
    assert one != other
    assert one["model"] == NAME


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_snapshot_that_was_changed_by_hand_is_no_commit(cache: Cache, name: str) -> None:
    snapshot = cache.hold(MAIN, config_json="c", model_safetensors="w")
    facts = cache.facts(NAME)
    (snapshot / name).unlink()
    (snapshot / name).write_text("trained")
    assert cache.facts(snapshot, MAIN)["model"] != facts["model"]


def test_one_model_in_two_places_is_one_by_the_operators_word(tmp_path: Path) -> None:
    models = [make_model(tmp_path / place / "llama") for place in ("a", "b")]
    one, other = (model_facts(str(model), tmp_path, "v2") for model in models)
    assert one == other
    # Equal samples do not prove equal models, so without a revision the path is a fact too.
    one, other = (model_facts(str(model), tmp_path) for model in models)
    assert one != other


def test_two_models_are_two_whatever_the_operator_calls_them(tmp_path: Path) -> None:
    models = [make_model(tmp_path / str(n), bytes([n]) * 9000) for n in range(2)]
    names = [*map(str, models), NAME, "acme/other"]
    facts = [tuple(model_facts(name, tmp_path, "prod").values()) for name in names]
    assert len(set(facts)) == len(names)


def test_a_path_without_weights_stays_a_fact(tmp_path: Path) -> None:
    models = [make_model(tmp_path / place) for place in ("a", "b")]
    for model in models:
        (model / "model-00001-of-00001.safetensors").unlink()
    one, other = (model_facts(str(model), tmp_path, "prod") for model in models)
    assert one != other
