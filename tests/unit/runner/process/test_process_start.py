from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretBytes
from support.runners import Make, MisbehavingConfig, MisbehavingTier
from support.tier_process import children, pid_of

from kvtier_sdk import (
    BackendLoadError,
    ConfigError,
    HostPool,
    Locality,
    Medium,
    MemoryTier,
    MemoryTierConfig,
    Namespace,
    PoolLayout,
    RunnerOptions,
    SystemClock,
    TieringConfig,
    TierSpec,
    TierUnavailableError,
)
from kvtier_sdk.engine import open_pool
from kvtier_sdk.runner import ProcessRunner, ThreadRunner, TierRunner
from kvtier_sdk.runner.factory import make_runner


@pytest.mark.parametrize("missing", ["a thread", "arguments"])
def test_a_process_that_cannot_be_started_is_an_error_of_the_start(
    make_rig: Make, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    start_thread = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "kvtier-held-wait":
            raise RuntimeError("can't start new thread")
        start_thread(thread)

    if missing == "a thread":
        monkeypatch.setattr(threading.Thread, "start", refuse)
        reason = "can't start new thread"
    else:
        monkeypatch.setattr(sys, "path", [*sys.path, "/nul\0"])
        reason = "embedded null byte"
    rig = make_rig()
    with pytest.raises(TierUnavailableError) as told:
        rig.client.open()
    assert str(told.value) == f"held open: its process cannot be started: {reason}"
    assert children() == []


def test_secrets_are_neither_in_the_command_line_nor_in_the_environment(make_rig: Make) -> None:
    secret = "hunter2-and-more"
    rig = make_rig(secret_key=secret).open()
    place = Path(f"/proc/{pid_of(rig.runner)}")
    for part in ("cmdline", "environ"):
        shown = (place / part).read_bytes()
        assert shown
        assert secret.encode() not in shown
    assert (place / "comm").read_text() == "kvtier:held\n"


def test_a_backend_of_the_engine_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shared: HostPool
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    module = tmp_path / "fleeting.py"
    module.write_text(
        "from kvtier_sdk import MemoryTier\nclass FleetingTier(MemoryTier):\n    pass\n"
    )
    import fleeting  # type: ignore[import-not-found]

    module.unlink()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with pytest.raises(BackendLoadError, match="'fleeting'.* use runner 'thread'"):
        make(shared, fleeting.FleetingTier, option="process").start()


@pytest.fixture
def shared() -> Iterator[HostPool]:
    pool = HostPool.create(PoolLayout(1, 64))
    yield pool
    pool.close()


@pytest.fixture
def own() -> Iterator[HostPool]:
    pool = HostPool(1, 64)
    yield pool
    pool.close()


def make(
    pool: HostPool,
    tier_class: type[MemoryTier],
    config: MemoryTierConfig | None = None,
    option: Any = "auto",
) -> TierRunner:
    spec = TierSpec(
        "mine", "memory", tier_class, config or MemoryTierConfig(), RunnerOptions(runner=option)
    )
    return make_runner(spec, pool, namespace=Namespace({}), clock=SystemClock(), notify=None)


class RemoteTier(MisbehavingTier):
    locality = Locality.REMOTE


class DiskTier(MisbehavingTier):
    medium = Medium.STORAGE


class BytesConfig(MisbehavingConfig):
    """Options that the SDK cannot send to a tier's process."""

    key: SecretBytes = SecretBytes(b"")


def test_auto_takes_a_process_for_all_but_memory_where_that_can_be(
    caplog: pytest.LogCaptureFixture, shared: HostPool, own: HostPool
) -> None:
    class LocalClassTier(RemoteTier):
        pass

    caplog.set_level(logging.WARNING)
    assert isinstance(make(shared, MemoryTier), ThreadRunner)
    script = MisbehavingConfig()
    for tier_class in (RemoteTier, DiskTier):
        assert isinstance(make(shared, tier_class, script), ProcessRunner)
        assert isinstance(make(shared, tier_class, script, "thread"), ThreadRunner)
    assert caplog.text == ""
    assert isinstance(make(own, RemoteTier, script), ThreadRunner)
    assert "runs in a thread, which may slow the engine down: the host pool" in caplog.text
    assert isinstance(make(shared, LocalClassTier, script), ThreadRunner)
    assert "cannot import" in caplog.text


def test_what_cannot_run_in_a_process_is_refused(shared: HostPool, own: HostPool) -> None:
    class LocalClassTier(MemoryTier):
        pass

    odd = BytesConfig(key=b"\xff")
    for pool, tier_class, config, message in (
        (own, MemoryTier, None, "the host pool is of one process: make it with open_pool"),
        (shared, LocalClassTier, None, "a process of its own cannot import"),
        (shared, MisbehavingTier, odd, "a process of its own gets the options"),
    ):
        with pytest.raises(ConfigError) as told:
            make(pool, tier_class, config, "process")
        beginning = "tier 'mine': option 'runner' is 'process', but "
        assert str(told.value).startswith(beginning + message)
        assert str(told.value).endswith("or use runner 'thread'")


def test_the_pool_is_shared_where_a_tier_wants_a_process() -> None:
    for option, shared in (("process", True), ("auto", False), ("thread", False)):
        options = {"slots": 2, "chunk_bytes": 64, "tiers": [f"memory:?runner={option}"]}
        with open_pool(TieringConfig.from_dict(options)) as pool:
            assert pool.is_shared is shared


class NeedyTier(MisbehavingTier):
    needs_process = True


def test_a_tier_that_needs_a_process_gets_one_or_is_refused(
    shared: HostPool, own: HostPool
) -> None:
    for option in ("auto", "process", "thread"):
        assert isinstance(make(shared, NeedyTier, MisbehavingConfig(), option), ProcessRunner)
    with pytest.raises(ConfigError) as caught:
        make(own, NeedyTier, MisbehavingConfig())
    assert str(caught.value) == (
        "tier 'mine': backend 'memory' has to run in a process of its own, but the host pool is of "
        "one process: make it with open_pool, HostPool.create or HostPool.join"
    )
