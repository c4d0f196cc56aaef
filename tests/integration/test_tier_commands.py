from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

import pytest
from support.command import kvtier, tier
from support.filled import CHUNK_BYTES, fill, keys_from
from support.stores import Folder, RedisStore, Store

from kvtier_sdk import Namespace
from kvtier_vllm.block_hashes import chunk_keys

FACTS: dict[str, Any] = {
    "engine": "vllm 0.32.0",
    "model": "meta-llama/Llama-3.1-8B",
    "model_revision": "0e9e39f249a16976918f6564b8830bc894c89659",
    "groups": [{"tokens_per_block": 16, "layers": ["a"]}],
    "tokens_per_hash": 16,
    "blocks_per_chunk": 2,
    "hash_algorithm": "sha256",
    "hash_seed": "11" * 32,
}
LLAMA = Namespace(FACTS)
RESEEDED = Namespace({**FACTS, "hash_seed": "22" * 32})
QWEN = Namespace({**FACTS, "model": "Qwen/Qwen3-8B"})
TOKENS = list(range(1000, 1100))
T = TypeVar("T", bound=Store)


def filled(store: T) -> T:
    (prompt,) = chunk_keys(TOKENS, FACTS)
    fill(store.url, LLAMA, [*keys_from(0, 20), *prompt[:2]])
    fill(store.url, RESEEDED, keys_from(0, 5))
    fill(store.url, QWEN, keys_from(0, 10))
    return store


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return filled(Folder(tmp_path / "kv", CHUNK_BYTES))


@pytest.fixture
def store(empty_store: Store) -> Store:
    return filled(empty_store)


def of_ours(namespace: Namespace) -> str:
    return namespace.for_chunks(CHUNK_BYTES).fingerprint


def chunks_by_namespace(url: str) -> dict[str, int]:
    (found,) = tier("ls", url)["tiers"]
    return {one["fingerprint"]: one["chunks"] for one in found["namespaces"]}


def test_ls_counts_the_chunks_of_each_namespace(store: Store) -> None:
    (found,) = tier("ls", store.url)["tiers"]
    assert (found["backend"], found["fault"]) == (store.name, None)
    ours = {one["fingerprint"]: one for one in found["namespaces"]}
    assert {of_ours(one) for one in (LLAMA, RESEEDED, QWEN)} == set(ours)
    llama = ours[of_ours(LLAMA)]
    assert llama["facts"]["model"] == "meta-llama/Llama-3.1-8B"
    assert llama["chunks"] == 22
    assert llama["bytes"] >= 22 * CHUNK_BYTES
    assert llama["plain_bytes"] == 22 * CHUNK_BYTES
    assert llama["oldest_s"] <= llama["last_used_s"]


def test_ls_is_a_table_for_people(folder: Folder) -> None:
    lines = kvtier("tier", "ls", folder.url).stdout.splitlines()
    assert lines[0].split() == (
        ["NAMESPACE", "MODEL", "REVISION", "CHUNKS", "BYTES", "OLDEST", "USE", "LAST", "USE"]
    )
    assert f"{of_ours(QWEN)[:12]}  Qwen/Qwen3-8B" in lines[1]
    assert "(" not in lines[1]


def test_du_shows_which_models_take_the_room(store: Store) -> None:
    (found,) = tier("du", store.url)["tiers"]
    assert found["chunks"] == 37
    is_on_disk = store.url.startswith("file:")
    assert (found["free_bytes"] is not None) is is_on_disk
    assert ("disk has" in kvtier("tier", "du", store.url).stdout) is is_on_disk
    models = {one["model"]: (one["namespaces"], one["chunks"]) for one in found["models"]}
    assert models == {"meta-llama/Llama-3.1-8B": (2, 27), "Qwen/Qwen3-8B": (1, 10)}


def test_rm_deletes_what_is_meant_and_nothing_else(folder: Folder) -> None:
    (removed,) = tier("rm", folder.url, "--model", "qwen", "--yes")["removed"]
    assert (removed["deleted"], removed["kept"]) == (10, 0)
    tier("rm", folder.url, "--namespace", of_ours(RESEEDED)[:8], "--yes")
    left = chunks_by_namespace(folder.url)
    assert left == {of_ours(LLAMA): 22, of_ours(RESEEDED): 0, of_ours(QWEN): 0}


def hostile(store: Folder) -> dict[str, bytes]:
    """Store manifests that no engine would write; return them by fingerprint."""
    huge = Namespace({"model": "qwen", "chunk_bytes": 10**15})
    texts = [
        b'{"facts": {"model": %b}}' % (b"[" * 900 + b"]" * 900),
        b'{"facts": {"model": "\\udc80qwen"}}',
        b"not JSON",
        b"[" * 2_000_000,
    ]
    manifests = {f"{number:x}" * 32: text for number, text in enumerate(texts)}
    manifests[huge.fingerprint] = huge.manifest_json().encode()
    for fingerprint, text in manifests.items():
        store.plant(fingerprint, text)
    return manifests


def test_odd_manifests_end_no_command(folder: Folder, tmp_path: Path) -> None:
    planted = hostile(folder)
    assert chunks_by_namespace(folder.url).items() >= dict.fromkeys(planted, 0).items()
    assert tier("du", folder.url)["tiers"][0]["chunks"] == 37
    assert len(tier("verify", folder.url)["namespaces"]) == 3 + len(planted)
    explained = tier("explain", folder.url, "--namespace", of_ours(RESEEDED))
    assert explained["tiers"][0]["nearest"]["fingerprint"] == of_ours(LLAMA)
    assert len(tier("copy", folder.url, f"file://{tmp_path}/to")["namespaces"]) == 3
    (removed,) = tier("rm", folder.url, "--model", "qwen", "--yes")["removed"]
    assert removed["fingerprint"] == of_ours(QWEN)
    shown = kvtier("tier", "ls", "--all", folder.url).stdout
    assert shown.count("unreadable manifest") == 3
    assert shown.count("unverified manifest") == 1


def test_rm_by_model_believes_only_a_manifest_that_fits_its_namespace(folder: Folder) -> None:
    folder.plant(of_ours(LLAMA), QWEN.for_chunks(CHUNK_BYTES).manifest_json().encode())
    (removed,) = tier("rm", folder.url, "--model", "qwen", "--yes")["removed"]
    assert removed["fingerprint"] == of_ours(QWEN)
    assert chunks_by_namespace(folder.url)[of_ours(LLAMA)] == 22
    assert "unverified manifest" in kvtier("tier", "ls", folder.url).stdout
    found = tier("copy", folder.url, "memory:", status=1)["namespaces"]
    assert {one["copied"]: bool(one["fault"]) for one in found} == {0: True, 5: False}


def test_a_manifest_of_another_type_ends_no_command(tmp_path: Path) -> None:
    store = RedisStore(tmp_path / "store", CHUNK_BYTES)
    try:
        fill(store.url, LLAMA, keys_from(0, 2))
        with store.client() as client:
            name = f"kvtier{{}}{of_ours(LLAMA)}.manifest"
            client.delete(name)
            client.rpush(name, "a", "b")
        assert chunks_by_namespace(store.url) == {of_ours(LLAMA): 2}
    finally:
        store.kill()


def test_what_is_in_a_store_is_shown_as_text(folder: Folder) -> None:
    said = "qwen [/red]{x}\x1b[2K\r\x9b\x07\u202e\udc80"
    facts = {**FACTS, "model": f"{said}\n0 chunks", f"hash_{said}": said, "hash_seed": "33" * 32}
    odd = Namespace(facts)
    fill(folder.url, odd, keys_from(0, 3))
    texts = []
    for words in (
        ["ls"],
        ["du"],
        ["explain", "--namespace", of_ours(odd)],
        ["verify"],
        ["copy", "memory:"],
        ["rm", "--yes", "--model", said[:4]],
    ):
        done = kvtier("tier", words[0], folder.url, *words[1:], FORCE_COLOR="1")
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    text = "".join(texts)
    shown = r"qwen [/red]{x}\x1b[2K\r\x9b\x07\u202e\udc80"
    assert text.count(rf"{shown}\n0 chunks") == 6
    assert "\n0 chunks" not in text
    assert text.replace("\n", "").isprintable()


def test_rm_by_age_keeps_what_was_used_since(folder: Folder) -> None:
    assert tier("rm", folder.url, "--unused-for", "1h", "--yes")["removed"] == []
    assert folder.chunks() == 37
    tier("rm", folder.url, "--unused-for", "1ms", "--yes")
    assert folder.chunks() == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [(["--yes"], "say which chunks to delete"), (["--all"], "there is no terminal to ask on")],
)
def test_rm_takes_nothing_for_granted(folder: Folder, words: list[str], says: str) -> None:
    done = kvtier("tier", "rm", folder.url, *words)
    assert done.returncode == 2
    assert says in done.stderr
    assert folder.chunks() == 37


def test_explain_finds_the_nearest_namespace_and_its_seed(folder: Folder) -> None:
    explained = tier("explain", folder.url, "--namespace", of_ours(RESEEDED))
    (found,) = explained["tiers"]
    assert (found["is_there"], found["contents"]["chunks"]) == (True, 5)
    assert found["nearest"]["fingerprint"] == of_ours(LLAMA)
    assert found["differences"] == {"hash_seed": {"ours": "22" * 32, "theirs": "11" * 32}}
    text = kvtier("tier", "explain", folder.url, "--namespace", of_ours(RESEEDED)).stdout
    assert "give them one PYTHONHASHSEED" in text


def test_a_check_changes_nothing_that_is_counted_or_chosen(folder: Folder) -> None:
    def seen() -> list[Any]:
        (du,) = tier("du", folder.url)["tiers"]
        (explained,) = tier("explain", folder.url)["tiers"]
        lines = kvtier("tier", "ls", folder.url).stdout.splitlines()
        return [du["chunks"], du["models"], explained["contents"]["chunks"], lines[1].split()[0]]

    tier("rm", folder.url, "--model", "meta-llama/Llama-3.1-8B", "--yes")
    before = seen()
    done = kvtier("check", folder.url)
    assert done.returncode == 0, done.stderr
    assert seen() == before


def test_explain_follows_a_difference_to_its_value(folder: Folder, tmp_path: Path) -> None:
    groups = [{"tokens_per_block": 32, "layers": ["a", "b"]}]
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps({**FACTS, "groups": groups, "chunk_bytes": CHUNK_BYTES}))
    (found,) = tier("explain", folder.url, "--namespace", str(facts))["tiers"]
    assert (found["is_there"], found["contents"]) == (False, None)
    assert set(found["differences"]) == {"groups[0].tokens_per_block", "groups[0].layers[1]"}


def test_explain_tells_present_from_absent_and_damaged(folder: Folder) -> None:
    stored, absent = keys_from(19, 2)
    words = ["--namespace", of_ours(LLAMA), "--key", stored.hex(), "--key", absent.hex()]
    assert tier("explain", folder.url, *words)["tiers"][0]["states"] == [["present", "absent"]]
    folder.damage()
    assert tier("explain", folder.url, *words)["tiers"][0]["states"] == [["damaged", "absent"]]
    assert folder.chunks() == 37


def test_explain_computes_a_prompts_keys(folder: Folder, tmp_path: Path) -> None:
    prompt = tmp_path / "prompt.json"
    # vLLM's /tokenize answers in this form.
    prompt.write_text(json.dumps({"count": len(TOKENS), "tokens": TOKENS}))
    words = ["--namespace", of_ours(LLAMA), "--tokens", str(prompt)]
    (salted,) = tier("explain", folder.url, *words, "--salt", "acme")["tiers"]
    assert salted["states"] == [["absent"] * 3]
    assert tier("explain", folder.url, *words)["tiers"][0]["states"] == [
        ["present", "present", "absent"]
    ]
    lines = kvtier("tier", "explain", folder.url, *words).stdout.splitlines()
    assert lines[-4:] == [
        "prompt, group 0: 3 chunks of 32 tokens; an engine gets the first 2 (64 tokens)",
        "CHUNKS  TOKENS  FILE",
        "0-1     0-63    present",
        "2       64-95   absent",
    ]


@pytest.mark.parametrize("answer", ["null", "7"])
def test_an_answer_without_tokens_is_a_mistake(folder: Folder, tmp_path: Path, answer: str) -> None:
    prompt = tmp_path / "prompt.json"
    prompt.write_text(f'{{"tokens": {answer}}}')
    done = kvtier("tier", "explain", folder.url, "--tokens", prompt)
    assert (done.returncode, "it holds no list of numbers" in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("flag", "needed"), [("--tokenizer", "--text"), ("--salt", "--tokens or --text")]
)
def test_a_flag_without_its_prompt_is_a_mistake(folder: Folder, flag: str, needed: str) -> None:
    done = kvtier("tier", "explain", folder.url, "--key", "00", flag, "acme")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"kvtier: {flag} goes with {needed}\n"


def test_all_tiers_of_a_configuration_are_asked(folder: Folder, tmp_path: Path) -> None:
    config = tmp_path / "kv.toml"
    config.write_text(
        f'slots = 8\n[[tiers]]\nurl = "{folder.url}"\n'
        '[[tiers]]\nurl = "redis://:hunter2@127.0.0.1:1"\n'
    )
    file, redis = tier("ls", str(config), status=1)["tiers"]
    assert len(file["namespaces"]) == 3
    assert "Connection refused" in redis["fault"]
    done = kvtier("tier", "ls", str(config))
    assert (done.returncode, "hunter2" in done.stdout + done.stderr) == (1, False)


def test_beside_others_a_tier_that_cannot_be_listed_is_no_fault(
    folder: Folder, tmp_path: Path
) -> None:
    config = tmp_path / "kv.toml"
    config.write_text(f'slots = 8\ntiers = ["memory:", "{folder.url}"]\n')
    memory, file = tier("ls", str(config))["tiers"]
    assert "cannot list its namespaces" in memory["note"]
    assert len(file["namespaces"]) == 3
    assert kvtier("tier", "du", str(config)).returncode == 0


def test_explain_says_that_no_tier_could_be_asked(tmp_path: Path) -> None:
    done = kvtier("tier", "explain", f"file://{tmp_path}/nothing", "--namespace", "ab")
    assert done.returncode == 1
    assert "there is no directory" in done.stdout


def test_a_namespace_without_a_length_is_not_examined(folder: Folder, tmp_path: Path) -> None:
    facts = tmp_path / "facts.json"
    facts.write_text(json.dumps(FACTS))
    words = ["--namespace", str(facts), "--key", "00"]
    found = tier("explain", folder.url, *words, status=1)
    assert "does not say how long a chunk is" in found["faults"]["file"]
