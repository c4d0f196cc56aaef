"""``kvtier check`` on the likeliest mistakes: one message each, which says what to do."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.command import kvtier
from support.redis_server import Server
from support.s3_server import SECRET_ACCESS_KEY, S3Server
from support.small_shm import run_with_shm

from kvtier_file import FileTierConfig
from kvtier_sdk import RunnerOptions

#: The options of a file tier.
ALLOWED = ", ".join(
    sorted(
        {"type", "backend", "name", "url"}.union(
            RunnerOptions.option_names(), FileTierConfig.option_names()
        )
    )
)
#: Name, content of the file, and the message.
MISTAKES = [
    (
        "a misspelt option",
        """
        slots = 4
        [[tiers]]
        type = "file"
        root = "{tmp}/kv"
        capcity = "1GiB"
        """,
        f"kv.toml: unknown option 'tiers[0].capcity'; did you mean 'capacity'? allowed: {ALLOWED}",
    ),
    (
        "a server that is down",
        """
        slots = 4
        tiers = ["redis://127.0.0.1:1"]
        """,
        "redis open: no connection to 127.0.0.1:1: Connection refused; see that the server runs "
        "there\n"
        "what to do: see that the store runs, that its address is right, and that this machine "
        "reaches it",
    ),
    (
        "a wrong password",
        """
        slots = 4
        tiers = ["redis://:hunter2@127.0.0.1:{port}"]
        """,
        "redis open: invalid username-password pair or user is disabled; check options 'username' "
        "and 'password'\n"
        "what to do: correct the credentials, or give this user access",
    ),
    (
        "a root that cannot be written",
        """
        slots = 4
        tiers = ["file:///proc/kv"]
        """,
        "tier 'file': tier root '/proc/kv' is not writable: No such file or directory; choose "
        "another root, or let this user write there",
    ),
    (
        "a root inside another tier's",
        """
        slots = 4
        tiers = ["file://{tmp}/kv", "file://{tmp}/kv/cold?name=cold"]
        """,
        "kv.toml: option 'tiers[1]': 'cold' keeps its chunks in file://{tmp}/kv/cold, inside "
        "file://{tmp}/kv, where 'file' (tiers[0]) keeps its own: give each a place of its own",
    ),
    (
        "two tiers on one root with different options",
        """
        slots = 4
        tiers = ["file://{tmp}/kv?capacity=1GiB", "file://{tmp}/kv?capacity=2GiB&name=cold"]
        """,
        "kv.toml: option 'tiers[1]': 'cold' keeps its chunks in file://{tmp}/kv, and so does "
        "'file' (tiers[0]), with other options (capacity): give each a place of its own, or both "
        "the same options",
    ),
    (
        "a bucket that is not there",
        """
        slots = 4
        tiers = ["s3://kvcache/chunks?{s3}"]
        """,
        "tier 's3': bucket 'kvcache' does not exist at http://{endpoint}; create it, or check "
        "option 'bucket' (the server answered 404 NoSuchBucket: The specified bucket does not "
        "exist)",
    ),
    (
        "a backend that is not installed",
        """
        slots = 4
        [[tiers]]
        type = "nfs"
        """,
        "kv.toml: option 'tiers[0].type': no backend 'nfs'; install the package that provides it; "
        "installed: {installed}",
    ),
]
#: Mistakes that the text alone shows; the others show when the tiers are tried.
IN_THE_TEXT = re.compile("kv.toml: ")


def check(file: Path, *arguments: str, site: Path | None = None) -> tuple[int, dict[str, Any]]:
    """Run the command, and return its exit status and findings."""
    words = ["check", "--json", "--timeout", "120s", *arguments, str(file)]
    done = kvtier(*words, PYTHONPATH=str(site or ""))
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


def told(findings: dict[str, Any], directory: Path) -> str:
    """Return all complaints, without the parts that differ between machines."""
    lines = [*findings["mistakes"], findings["pool_fault"]]
    for tier in findings["tiers"]:
        lines += [tier["fault"], tier["advice"] and f"what to do: {tier['advice']}"]
    return "\n".join(filter(None, lines)).replace(f"{directory}/kv.toml", "kv.toml")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A redis-server with a password."""
    server = Server(tmp_path_factory.mktemp("redis"), "--requirepass", "right")
    server.client_options["password"] = "right"
    server.start()
    yield server
    server.kill()


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server with another bucket."""
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.mark.parametrize(
    ("text", "expected"), [m[1:] for m in MISTAKES], ids=[m[0] for m in MISTAKES]
)
def test_a_mistake_is_told_in_one_message(
    text: str, expected: str, tmp_path: Path, faulty_site: Path, guarded: Server, s3: S3Server
) -> None:
    (tmp_path / "kv.toml").write_text(
        textwrap.dedent(text)
        .replace("{tmp}", str(tmp_path))
        .replace("{port}", str(guarded.port))
        .replace("{s3}", s3.tier_url().partition("?")[2])
    )
    installed = "broken, clumsy, file, memory, mooncake, newer, redis, s3, stranger, talkative"
    expected = expected.replace("{tmp}", str(tmp_path)).replace("{installed}", installed)
    expected = expected.replace("http://{endpoint}", s3.endpoint)
    status, findings = check(tmp_path / "kv.toml", site=faulty_site)
    assert told(findings, tmp_path) == expected
    assert status == (2 if IN_THE_TEXT.match(expected) else 1)
    shown = json.dumps(findings)
    assert "hunter2" not in shown
    assert SECRET_ACCESS_KEY not in shown


def test_a_pool_larger_than_shared_memory_is_told(tmp_path: Path) -> None:
    (tmp_path / "kv.json").write_text(
        json.dumps(
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {
                    "spec_name": "KVTierOffloadingSpec",
                    "spec_module_path": "kvtier_vllm",
                    "cpu_bytes_to_use": "64MiB",
                    "secondary_tiers": ["memory:"],
                },
            }
        )
    )
    run_with_shm(
        16 << 20,
        f"""
        import contextlib, io, json, pathlib, sys
        from kvtier_sdk.cli import main
        sys.argv = ["kvtier", "check", "--json", {str(tmp_path / "kv.json")!r}]
        with open({str(tmp_path / "out")!r}, "w") as out, contextlib.redirect_stdout(out):
            with contextlib.suppress(SystemExit):
                main()
        """,
    )
    findings = json.loads((tmp_path / "out").read_text())
    assert not findings["ok"]
    assert told(findings, tmp_path) == (
        "the host pool needs 64 MiB, and 16 MiB are free in /dev/shm: make the pool smaller, or "
        "make /dev/shm larger (docker run --shm-size, in Kubernetes an emptyDir of medium Memory)"
    )
