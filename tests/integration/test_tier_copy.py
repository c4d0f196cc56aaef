"""``kvtier tier verify`` finds damaged chunks; ``copy`` loses no chunk, even if it is killed.

``KVTIER_COPY_CHUNKS`` sets the number of chunks to copy.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import typer
from support.command import kvtier, tier
from support.filled import CHUNK_BYTES, contents, fill, floats, keys_from
from support.keys import OURS, write_keys
from support.live import content
from support.s3_server import S3Server
from support.stores import Folder, RedisStore, S3Store, Store

from kvtier_sdk import Namespace
from kvtier_sdk.cli.tier.copy import copy_command
from kvtier_sdk.cli.tier.verify import Pace, verify_command
from kvtier_sdk.options.units import format_bytes

NAMESPACE = Namespace({"model": "llama", "hash_seed": "00"})
CHUNKS = int(os.environ.get("KVTIER_COPY_CHUNKS", "300"))
_PATIENCE_S = 120.0


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[list[Store]]:
    with ExitStack() as ended:
        made: list[Store] = []
        for kind in (Folder, RedisStore, S3Store):
            made.append(kind(tmp_path / kind.name, CHUNK_BYTES))
            ended.callback(made[-1].kill)
        yield [*made, Folder(tmp_path / "back", CHUNK_BYTES)]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "kv", CHUNK_BYTES)


def damage(files: list[Path]) -> None:
    ways = [
        lambda file: os.truncate(file, file.stat().st_size - 1),
        lambda file: os.truncate(file, file.stat().st_size + 1),
        lambda file: flip(file, 20),
        lambda file: flip(file, file.stat().st_size - 7),
        lambda file: file.write_bytes(random.Random(7).randbytes(file.stat().st_size)),
    ]
    for number, file in enumerate(files):
        ways[number % len(ways)](file)


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_verify_finds_each_of_50_damaged_chunks_and_repairs(folder: Folder, tmp_path: Path) -> None:
    fill(folder.url, NAMESPACE, keys_from(0, 500))
    files = sorted(tmp_path.rglob("*.kv"))
    victims = random.Random(3).sample(files, 50)
    damage(victims)
    damaged = sorted(file.stem for file in victims)
    (found,) = tier("verify", folder.url, status=1)["namespaces"]
    assert (found["whole"], sorted(found["damaged"]), found["deleted"]) == (450, damaged, 0)
    assert folder.chunks() == 500
    (repaired,) = tier("verify", folder.url, "--repair")["namespaces"]
    assert (sorted(repaired["damaged"]), repaired["deleted"]) == (damaged, 50)
    (after,) = tier("verify", folder.url)["namespaces"]
    assert (after["whole"], after["damaged"]) == (450, [])


def killed_and_completed(src: Store, dst: Store, chunks: int) -> dict[str, Any]:
    words = ["tier", "copy", "--json", "--rate", "64MiB", src.url, dst.url]
    command = [sys.executable, "-c", "from kvtier_sdk.cli import main; main()", *words]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        end_s = time.monotonic() + _PATIENCE_S
        while dst.chunks() < chunks // 2 and process.poll() is None:
            assert time.monotonic() < end_s
        process.kill()
    assert dst.chunks() > 0
    (found,) = tier("copy", "--read-back", src.url, dst.url)["namespaces"]
    return found


def test_chunks_go_round_all_stores_although_each_copy_is_killed(stores: list[Store]) -> None:
    keys = keys_from(0, CHUNKS)
    fill(stores[0].url, NAMESPACE, keys)
    for src, dst in pairwise(stores):
        found = killed_and_completed(src, dst, CHUNKS)
        assert found["copied"] + found["there"] == CHUNKS
        assert {found[name] for name in ("gone", "damaged", "evicted", "missing")} == {0}
        assert dst.chunks() == CHUNKS
    back = contents(stores[-1].url, NAMESPACE, keys)
    assert back == [content(key, CHUNK_BYTES) for key in keys]
    (again,) = tier("copy", stores[2].url, stores[-1].url)["namespaces"]
    assert (again["copied"], again["there"]) == (0, CHUNKS)


def test_a_destination_that_is_too_small_is_told(
    folder: Folder,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    fill(folder.url, NAMESPACE, keys_from(0, 20))
    small = f"file://{tmp_path}/to?direct_io=off&capacity={10 * 2 * CHUNK_BYTES}"
    # With a pool of only 8 chunks, the command copies this small store in parts, like a large one.
    monkeypatch.setattr("kvtier_sdk.cli.tier.copy._POOL_BYTES", 8 * CHUNK_BYTES)
    with pytest.raises(typer.Exit):
        copy_command(folder.url, small)
    assert "10 chunks copied" in (said := capsys.readouterr().out)
    assert "10 evicted by DST meanwhile: its capacity is too small" in said


def test_sealed_chunks_are_opened_and_sealed_again(folder: Folder, tmp_path: Path) -> None:
    codec = write_keys(tmp_path / "chunk.keys", OURS)
    sealed = f"file://{tmp_path}/sealed?direct_io=off&codec={codec}"
    keys = keys_from(0, 20)
    fill(folder.url, NAMESPACE, keys)
    tier("copy", folder.url, sealed)
    assert contents(sealed, NAMESPACE, keys) == [content(key, CHUNK_BYTES) for key in keys]
    without_keys = f"file://{tmp_path}/sealed?direct_io=off"
    done = kvtier("tier", "copy", without_keys, f"file://{tmp_path}/open")
    assert done.returncode == 1
    assert "is sealed: give tier 'file' its option 'codec', 'aes-gcm:...'" in done.stdout
    tier("copy", sealed, f"file://{tmp_path}/open")
    back = contents(f"file://{tmp_path}/open", NAMESPACE, keys)
    assert back == [content(key, CHUNK_BYTES) for key in keys]


def test_compressed_chunks_are_listed_verified_and_copied(tmp_path: Path) -> None:
    namespace, keys = Namespace({"model": "llama", "dtype": "bfloat16"}), keys_from(0, 20)
    with S3Server(tmp_path) as server:
        objects = server.buckets / "kv"
        less = server.tier_url("kv/less", compress="always")
        fill(less, namespace, keys, floats)
        less_bytes = sum(file.stat().st_size for file in objects.rglob("*.kv"))
        assert 0.6 < less_bytes / 20 / CHUNK_BYTES < 0.85
        done = kvtier("tier", "ls", less, "--json")
        (listed,) = json.loads(done.stdout)["tiers"][0]["namespaces"]
        sizes = {"chunks": 20, "bytes": less_bytes, "plain_bytes": 20 * CHUNK_BYTES}
        sizes["ratio"] = 20 * CHUNK_BYTES / less_bytes
        assert (sizes.items() <= listed.items(), done.stderr) == (True, "")
        (used,) = tier("du", less)["tiers"]
        assert sizes.items() <= used.items()
        assert sizes.items() <= used["models"][0].items()
        for command in ("ls", "du"):
            said = f"{format_bytes(less_bytes)} (80 KiB / {sizes['ratio']:.2f})"
            assert said in kvtier("tier", command, less).stdout
        # The form of a copied chunk depends only on DST's options.
        codec = write_keys(tmp_path / "chunk.keys", OURS)
        plain, again = (server.tier_url(f"kv/{place}") for place in ("plain", "again"))
        sealed = server.tier_url("kv/sealed", compress="always", codec=codec)
        copies = [
            *tier("copy", less, plain)["namespaces"],
            *tier("copy", plain, sealed)["namespaces"],
            *tier("copy", "--read-back", sealed, f"{again}&compress=always")["namespaces"],
        ]
        plain_bytes = 20 * (CHUNK_BYTES + 64)
        for url, stored_bytes in ((plain, plain_bytes), (again, less_bytes)):
            assert tier("du", url)["tiers"][0]["bytes"] == stored_bytes
            assert contents(url, namespace, keys) == [floats(key, CHUNK_BYTES) for key in keys]
        sealed_bytes = tier("du", sealed)["tiers"][0]["bytes"]
        assert sealed_bytes < 0.9 * 20 * CHUNK_BYTES
        stages = [less_bytes, plain_bytes, sealed_bytes, less_bytes]
        moved = [(copied["read_bytes"], copied["written_bytes"]) for copied in copies]
        assert moved == list(pairwise(stages))
        assert {copied["copied_bytes"] for copied in copies} == {20 * CHUNK_BYTES}
        for url, compressed in ((less, 20), (plain, 0), (sealed, 20)):
            (found,) = tier("verify", url)["namespaces"]
            assert (found["whole"], found["compressed"]) == (20, compressed)
            assert found["bytes"] == tier("du", url)["tiers"][0]["bytes"]
            assert found["plain_bytes"] == 20 * CHUNK_BYTES
        damage(files := sorted(objects.glob("less/*/*/*.kv"))[:5])
        (found,) = tier("verify", less, status=1)["namespaces"]
        assert (found["compressed"], found["plain_bytes"]) == (15, 15 * CHUNK_BYTES)
        assert (found["whole"], set(found["damaged"])) == (15, {file.stem for file in files})
        asked = [word for key in keys for word in ("--key", key.hex())]
        (states,) = tier("explain", less, *asked)["tiers"][0]["states"]
        assert (states.count("present"), states.count("damaged")) == (15, 5)
        (found,) = tier("copy", less, server.tier_url("kv/rest"), status=1)["namespaces"]
        assert (found["copied"], found["damaged"]) == (15, 5)


def test_rounded_chunks_are_verified_and_stay_apart_from_exact_ones(tmp_path: Path) -> None:
    exact, keys = Namespace({"model": "llama", "dtype": "bfloat16"}), keys_from(0, 20)
    rounded = exact.adding(compress="fp8")
    codec = write_keys(tmp_path / "chunk.keys", OURS)
    with S3Server(tmp_path) as server:
        one, other, last = (server.tier_url(f"kv/{place}") for place in ("one", "other", "last"))
        fp8 = f"{one}&compress=fp8"
        sealed = server.tier_url("kv/sealed", compress="fp8", codec=codec)
        fill(fp8, exact, keys, floats)
        assert tier("du", one)["tiers"][0]["bytes"] < 0.54 * 20 * (CHUNK_BYTES + 64)
        chunks = contents(fp8, exact, keys)
        assert None not in chunks
        assert contents(one, exact, keys) == [None] * 20
        for url in (fp8, one):
            namespaces = tier("verify", url)["namespaces"]
            assert sum(found["whole"] for found in namespaces) == 20
        # Rounded chunks keep their namespace, even if DST does not round.
        tier("copy", one, f"{other}&compress=always")
        assert contents(other, exact, keys) == [None] * 20
        assert contents(other, rounded, keys) == chunks
        tier("copy", other, sealed)
        assert contents(sealed, exact, keys) == chunks
        tier("copy", "--read-back", server.tier_url("kv/sealed", codec=codec), last)
        assert contents(last, rounded, keys) == chunks
        # Exact chunks are rounded on their way to a tier that rounds.
        fill(last, exact, keys, floats)
        new = server.tier_url("kv/new", compress="fp8")
        tier("copy", "--namespace", facts_of(exact, tmp_path), last, new)
        assert contents(new, exact, keys) == chunks


def facts_of(namespace: Namespace, directory: Path) -> str:
    written = directory / "facts.json"
    written.write_text(json.dumps(namespace.for_chunks(CHUNK_BYTES).facts))
    return str(written)


def test_a_manifest_that_hides_a_secret_needs_the_facts(folder: Folder, tmp_path: Path) -> None:
    ours = Namespace({"model": "llama", "tenant_token": "hunter2"})
    fill(folder.url, ours, keys_from(0, 5))
    destination = f"file://{tmp_path}/to"
    done = kvtier("tier", "copy", folder.url, destination)
    assert done.returncode == 1
    assert "(unverified manifest): its manifest does not say how long" in done.stdout
    assert tier("du", folder.url)["tiers"][0]["plain_bytes"] is None
    tier("copy", "--namespace", facts_of(ours, tmp_path), folder.url, destination)
    assert None not in contents(destination, ours, keys_from(0, 5))


def test_a_rate_is_of_stored_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    namespace = Namespace({"model": "llama", "dtype": "bfloat16"})
    moved: list[int] = []
    monkeypatch.setattr(Pace, "wait", lambda self, size_bytes: moved.append(size_bytes))
    monkeypatch.setattr("kvtier_sdk.cli.tier.copy._POOL_BYTES", 8 * CHUNK_BYTES)
    with S3Server(tmp_path) as server:
        less, plain = server.tier_url("kv/less", compress="always"), server.tier_url("kv/plain")
        fill(less, namespace, keys_from(0, 20), floats)
        verify_command(less)
        less_bytes = sum(file.stat().st_size for file in server.buckets.rglob("*.kv"))
        assert sum(moved) == less_bytes
        sizes = f"{format_bytes(less_bytes)} (80 KiB / {20 * CHUNK_BYTES / less_bytes:.2f})"
        assert f"20 compressed; the whole ones take {sizes}" in capsys.readouterr().out
        moved.clear()
        copy_command(less, plain)
        # Only 16 of 20 chunks count, because the last four are stored after the last wait.
        assert sum(moved) == 16 * (CHUNK_BYTES + 64) > less_bytes
        moved.clear()
        copy_command(plain, server.tier_url("kv/again", compress="always"))
        assert sum(moved) == 20 * (CHUNK_BYTES + 64)
        read, written = format_bytes(20 * (CHUNK_BYTES + 64)), format_bytes(less_bytes)
        assert f"(80 KiB, {read} read, {written} written)" in capsys.readouterr().out


def test_a_rate_is_kept(folder: Folder, tmp_path: Path) -> None:
    fill(folder.url, NAMESPACE, keys_from(0, 100))
    started_s = time.monotonic()
    tier("verify", "--rate", "400KiB", folder.url)
    assert time.monotonic() - started_s > 0.9
