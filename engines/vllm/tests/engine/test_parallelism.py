"""Engines of different parallelism share chunks if and only if the bytes are the same."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.stores import Folder, Mooncake, RedisStore, S3Store, Store

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import torch
    from vllm_config import KEYS
    from vllm_ranks import BLOCK_TOKENS, HEADS, LAYERS, WIDTH, Replica

    from kvtier_sdk import ConfigError
    from kvtier_vllm import plugin
    from kvtier_vllm.identity import THEIR_SLOTS, Identity
    from kvtier_vllm.options import IdentityOptions

CHUNK_BYTES = {
    "llama": 4 * LAYERS * BLOCK_TOKENS * HEADS * WIDTH["llama"],
    "deepseek": 4 * LAYERS * BLOCK_TOKENS * WIDTH["deepseek"],
}


@pytest.fixture(autouse=True)
def registered() -> None:
    plugin.register()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


class ObstoreStore(S3Store):
    name = "obstore"

    def __init__(self, folder: Path, chunk_bytes: int) -> None:
        super().__init__(folder, chunk_bytes)
        self.url = self.url.replace("s3://", "obstore://", 1) + "&service=s3"


def options(way: str, store: Store, **extra: Any) -> dict[str, Any]:
    entry = {"url": store.url, "runner": store.runners[0], "lookup_deadline": "30s"}
    spec = {"spec_name": "KVTierOffloadingSpec", "spec_module_path": "kvtier_vllm"}
    if way == "a":
        spec = {"spec_name": "TieringOffloadingSpec"}
        entry |= {"type": "kvtier", "model_revision": "made up"}
    else:
        extra |= {"model_revision": "made up", "recompute": "1h"}
    return {**spec, "secondary_tiers": [entry], **extra}


def made_up_kv(model: str, blocks: int = len(KEYS)) -> torch.Tensor:
    heads = 1 if model == "deepseek" else HEADS
    return torch.rand(LAYERS, blocks, heads, BLOCK_TOKENS, WIDTH[model])


@pytest.fixture(params=[Folder, RedisStore, S3Store, ObstoreStore, Mooncake], ids=lambda k: k.name)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    made = request.param(tmp_path / "store", CHUNK_BYTES["llama"])
    yield made
    made.kill()


@pytest.mark.parametrize("way", ["a", "b"])
def test_certified_chunks_are_read_by_any_number_of_workers(
    store: Store, way: str, models: Path
) -> None:
    whole = made_up_kv("llama")
    extra = options(way, store, canonical_layout=True)
    with Replica(models, "llama", 2, extra) as two:
        two.fill(whole)
        two.store(KEYS)
    assert store.chunks() == len(KEYS)
    for tp in (4, 1):
        with Replica(models, "llama", tp, extra) as other:
            assert facts_of(other)["parallelism"] == "independent: canonical_layout"
            loaded = other.load(KEYS)
            assert loaded is not None
            assert all(map(torch.equal, loaded, other.shares(whole)))


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_our_copies_write_and_read_vllms_canonical_layout(
    tmp_path: Path, models: Path, layout: str
) -> None:
    whole = made_up_kv("llama", 2 * len(KEYS))
    chunk_bytes = 2 * CHUNK_BYTES["llama"]

    def replica(writer: str, copies: str, tp: int) -> Replica:
        store = Folder(tmp_path / writer, chunk_bytes)
        given = options("b", store, canonical_layout=True, copies=copies, blocks_per_chunk=2)
        return Replica(models, "llama", tp, given, layout=layout)

    written = {}
    for copies, tp in (("vllm", 2), ("kvtier", 1), ("kvtier", 2), ("kvtier", 4)):
        writer = f"{copies}-{tp}"
        with replica(writer, copies, tp) as engine:
            engine.fill(whole)
            engine.store(KEYS)
        written[writer] = {
            path.relative_to(tmp_path / writer): path.read_bytes()[-chunk_bytes:]
            for path in (tmp_path / writer).rglob("*.kv")
        }
    assert len(written["vllm-2"]) == len(KEYS)
    assert all(chunks == written["vllm-2"] for chunks in written.values())
    for writer, copies, tp in (
        ("kvtier-2", "kvtier", 1),
        ("kvtier-2", "kvtier", 4),
        ("kvtier-2", "vllm", 4),
        ("vllm-2", "kvtier", 4),
    ):
        with replica(writer, copies, tp) as reader:
            loaded = reader.load(KEYS)
            assert loaded is not None
            assert all(map(torch.equal, loaded, reader.shares(whole)))


def test_the_fleets_page_shares_between_two_and_four_workers(tmp_path: Path, models: Path) -> None:
    page = Path(__file__).parents[4] / "examples/fleet/two-degrees.json"
    extra = json.loads(page.read_text())["kv_connector_extra_config"]
    store = Mooncake(tmp_path / "store", CHUNK_BYTES["llama"])
    try:
        (place,) = extra["secondary_tiers"]
        entry = {"url": place.replace("mooncake://kv-master:50051", store.url)}
        entry["lookup_deadline"] = "30s"
        of_test = {"cpu_bytes_to_use": 2**22, "model_revision": "made up", "recompute": "1h"}
        extra |= {"secondary_tiers": [entry], **of_test}
        whole = made_up_kv("llama")
        with Replica(models, "llama", 2, extra) as two:
            two.fill(whole)
            two.store(KEYS)
        with Replica(models, "llama", 4, extra) as four:
            loaded = four.load(KEYS)
            assert loaded is not None
            assert all(map(torch.equal, loaded, four.shares(whole)))
    finally:
        store.kill()


@pytest.mark.parametrize(
    ("way", "extra"),
    [
        ("a", {}),
        ("b", {}),
        ("b", {"copies": "kvtier"}),
        ("a", {"canonical_layout": True}),
        ("b", {"canonical_layout": True}),
        ("b", {"canonical_layout": True, "copies": "kvtier"}),
    ],
    ids=str,
)
def test_workers_that_hold_the_same_bytes_store_them_once(
    tmp_path: Path, models: Path, way: str, extra: dict[str, Any]
) -> None:
    store = Folder(tmp_path / "store", CHUNK_BYTES["deepseek"])
    whole = made_up_kv("deepseek")
    given = options(way, store, **extra)
    with Replica(models, "deepseek", 2, given) as two:
        two.fill(whole)
        two.store(KEYS)
    sizes = {path.stat().st_size for path in (tmp_path / "store").rglob("*.kv")}
    assert store.chunks() == len(KEYS)
    # Each file has a single copy of the bytes, and a header that is shorter than a copy.
    assert CHUNK_BYTES["deepseek"] < max(sizes) < 2 * CHUNK_BYTES["deepseek"]
    with Replica(models, "deepseek", 4, given) as four:
        assert facts_of(four)["parallelism"] == "independent: replicated_layout"
        loaded = four.load(KEYS)
        assert loaded is not None
        assert len(loaded) == 4
        assert all(torch.equal(part, whole) for part in loaded)


#: Each case is two engines' tensor and pipeline parallelism, and options for both engines.
APART = [
    pytest.param((2, 1), (4, 1), {}, id="tensor"),
    pytest.param((1, 1), (1, 2), {}, id="pipeline"),
    pytest.param((2, 1), (4, 1), {"copies": "kvtier"}, id="our copies"),
]


@pytest.mark.parametrize(("one", "other", "extra"), APART)
def test_chunks_without_certification_are_never_shared(
    tmp_path: Path,
    models: Path,
    one: tuple[int, int],
    other: tuple[int, int],
    extra: dict[str, Any],
) -> None:
    ways = ("b",) if extra else ("a", "b")
    for way in ways:
        store = Folder(tmp_path / way, CHUNK_BYTES["llama"])
        given = options(way, store, **extra)
        tp, pp = one
        with Replica(models, "llama", tp, given, pp=pp) as first:
            first.fill(made_up_kv("llama"))
            first.store(KEYS)
        tp, pp = other
        with Replica(models, "llama", tp, given, pp=pp) as second:
            assert second.config.parallel.is_parallelism_agnostic
            assert second.load(KEYS) is None


def test_vllms_flag_does_not_hold_for_its_direct_layout(tmp_path: Path, models: Path) -> None:
    """Direct chunks differ although vLLM's flag is set, so the namespace needs the parallelism."""
    whole = made_up_kv("llama")
    payloads = {}
    for canonical in (False, True):
        for tp in (1, 2):
            store = Folder(tmp_path / f"{canonical}-{tp}", CHUNK_BYTES["llama"])
            extra = options("a", store, canonical_layout=canonical)
            with Replica(models, "llama", tp, extra) as engine:
                assert engine.config.parallel.is_parallelism_agnostic
                engine.fill(whole)
                engine.store(KEYS[:1])
            (chunk,) = (tmp_path / f"{canonical}-{tp}").rglob("*.kv")
            payloads[canonical, tp] = chunk.read_bytes()[-CHUNK_BYTES["llama"] :]
    assert payloads[False, 1] != payloads[False, 2]
    assert payloads[True, 1] == payloads[True, 2]


#: Each case is a model, a parallelism that vLLM does not certify for it, and vLLM's error.
UNCERTIFIED = [
    pytest.param("llama", 1, 2, "could not be certified", id="pipeline"),
    pytest.param("narrow values", 2, 1, "could not certify every layer", id="values"),
]


@pytest.mark.parametrize(("model", "tp", "pp", "theirs"), UNCERTIFIED)
@pytest.mark.parametrize(
    ("way", "given"), [("a", {}), ("b", {}), ("b", {"copies": "kvtier"})], ids=str
)
def test_a_layout_that_vllm_does_not_certify_stops_the_engine(
    tmp_path: Path,
    models: Path,
    way: str,
    given: dict[str, Any],
    model: str,
    tp: int,
    pp: int,
    theirs: str,
) -> None:
    extra = options(way, Folder(tmp_path, 1), canonical_layout=True, **given)
    error, message = RuntimeError, theirs
    if way == "b":
        error, message = ConfigError, "option 'canonical_layout': vLLM has no canonical layout"
    with pytest.raises(error, match=message):
        Replica(models, model, tp, extra, pp=pp)


def facts_of(replica: Replica) -> dict[str, Any]:
    identity = Identity(
        replica.config,
        chunk_bytes=1,
        slot_layout=THEIR_SLOTS,
        declared=IdentityOptions(model_revision="made up"),
    )
    return dict(identity.namespace.facts)
