"""A secret in a file is read again when the store refuses it, with any backend and runner."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.runners import Rig

from kvtier_sdk import Entry, SystemClock, TierAuthError, make_offload_key
from kvtier_sdk.options.secret_sources import FileSecret
from kvtier_sdk.options.secrets import Secrets
from kvtier_sdk.runner.calls import TierCaller
from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.runner.log import TierLog

MakeRig = Callable[..., Rig]


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.touch(0o600)
    path.write_text("hunter2")
    return path


@pytest.fixture
def accepted(tmp_path: Path) -> Path:
    """The file with the secret that the store accepts."""
    path = tmp_path / "diary.key"
    path.write_text("hunter2")
    return path


@pytest.fixture
def make_rig(make_rig: MakeRig, secret: Path, accepted: Path) -> MakeRig:
    """Make a runner around a tier whose secret is in a file."""
    return partial(make_rig, secret_key=FileSecret(str(secret)))


@pytest.fixture(autouse=True)
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    caplog.set_level(logging.DEBUG)
    yield caplog
    assert "hunter" not in caplog.text


def test_a_call_that_is_refused_is_made_once_more(
    make_rig: MakeRig, secret: Path, accepted: Path, log: pytest.LogCaptureFixture
) -> None:
    rig = make_rig(on_lookup="demand_secret", on_load="demand_secret")
    rig.client.open()
    assert rig.do(Operation.STORE, 0) == ["ok"]
    for round_, operation in enumerate((Operation.LOOKUP, Operation.LOAD), 3):
        secret.write_text(f"hunter{round_}")
        accepted.write_text(f"hunter{round_}")
        assert rig.do(operation, 0) == ["ok"]
    assert rig.past().count("asked") == 4
    assert log.text.count(f"the store refused; a new secret was read from {secret}") == 2


def test_an_opening_that_is_refused_is_made_once_more(
    make_rig: MakeRig, secret: Path, accepted: Path
) -> None:
    rig = make_rig(on_open="demand_secret")
    secret.write_text("hunter3")
    accepted.write_text("hunter3")
    rig.client.open()
    assert rig.client.stats.is_open


def test_without_another_secret_a_refusal_stays_one(
    make_rig: MakeRig, secret: Path, accepted: Path, log: pytest.LogCaptureFixture
) -> None:
    accepted.write_text("hunter3")
    rig = make_rig(on_lookup="demand_secret")
    rig.client.open()
    assert rig.do(Operation.LOOKUP, 0) == ["auth"]
    assert rig.past().count("asked") == 1
    secret.unlink()
    assert rig.do(Operation.LOOKUP, 0) == ["auth"]
    assert f"held: {secret} cannot be read again: No such file or directory" in log.text


async def test_a_listing_that_is_refused_midway_does_not_look_complete(secret: Path) -> None:
    async def scan() -> AsyncIterator[Entry]:
        yield Entry(make_offload_key(b"first"), 1)
        secret.write_text("hunter3")
        raise TierAuthError("denied")

    tier: Any = SimpleNamespace(scan=scan)
    secrets = Secrets(files=[FileSecret(str(secret))])
    entries = TierCaller(lambda: tier, secrets, TierLog("held", SystemClock())).entries()
    assert (await anext(entries)).object_bytes == 1
    with pytest.raises(TierAuthError):
        await anext(entries)
