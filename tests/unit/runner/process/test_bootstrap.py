"""Options reach a tier's process unchanged, and errors come back unchanged."""

from __future__ import annotations

import json
import socket
import ssl
from enum import Enum
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import BeforeValidator, Field, SecretBytes, SecretStr
from support.runners import ExpiredError

from kvtier_sdk import (
    BytesOrShare,
    ConfigError,
    MemoryTier,
    MemoryTierConfig,
    Namespace,
    PoolLayout,
    RunnerOptions,
    Seconds,
    TierError,
    TierSpec,
)
from kvtier_sdk.runner.process.bootstrap import (
    fault_of,
    read_bootstrap,
    read_error,
    write_bootstrap,
    write_error,
)


class Colour(Enum):
    RED = "red"


class OddConfig(MemoryTierConfig):
    """Options of every type that can be sent to a process."""

    root: Path = Path("/")
    password: SecretStr | None = None
    tokens: tuple[SecretStr, ...] = ()
    key: SecretBytes = SecretBytes(b"")
    names: frozenset[str] = frozenset()
    colour: Colour = Colour.RED
    wait_s: Seconds = 0.0
    room: BytesOrShare = 0.5
    table: dict[str, Any] = Field(default_factory=dict)


class MegaConfig(MemoryTierConfig):
    size: Annotated[int, BeforeValidator(lambda value: int(value) << 20)] = 0


class OddTier(MemoryTier):
    config_model = OddConfig


class MegaTier(MemoryTier):
    config_model = MegaConfig


def cross(config: MemoryTierConfig, tier_class: type[MemoryTier]) -> tuple[TierSpec, TierSpec]:
    """Return the tier's spec, and the spec that its process rebuilds."""
    options = RunnerOptions(load_deadline="2s")
    spec = TierSpec("mine", "mine", tier_class, config, options, verify=False)
    assert fault_of(spec) is None
    sent = write_bootstrap(spec, namespace=Namespace({}), layout=PoolLayout(1, 64), pool_fd=0)
    arrived, _, _ = read_bootstrap(json.loads(json.dumps(sent)))
    return spec, arrived


def test_options_arrive_as_they_are() -> None:
    config = OddConfig(
        root="/x",
        password="hunter2",
        tokens=["a", "b"],
        key="k",
        names=[str(number) for number in range(50)],
        wait_s="250ms",
        room="5%",
        table={"deep": [1, {"x": None}]},
        capacity="1GiB",
    )
    spec, arrived = cross(config, OddTier)
    assert arrived == spec
    assert arrived.config.model_fields_set == config.model_fields_set


def test_an_option_that_is_another_in_the_process_is_refused_there() -> None:
    assert cross(MegaConfig(), MegaTier)
    with pytest.raises(ConfigError, match=r"^tier 'mine': .* not the same: .*use runner 'thread'$"):
        cross(MegaConfig(size=1), MegaTier)


class OddError(Exception):
    """An error whose text does not depend on ``args``."""

    def __init__(self, code: int, *, hint: str) -> None:
        super().__init__(code, object())
        self.hint = hint

    def __str__(self) -> str:
        return f"try {self.hint}"


class StubbornError(ConnectionError):
    def __new__(cls, host: str, port: int) -> StubbornError:
        return super().__new__(cls)

    def __str__(self) -> str:
        return "no way"


def across(error: BaseException) -> BaseException:
    return read_error(json.loads(json.dumps(write_error(error))))


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("option 'bucket' names none"),
        ExpiredError("Ada", 3),
        Exception("just that"),
        ValueError(),
        KeyError("ttl"),
        FileNotFoundError(2, "No such file or directory"),
        PermissionError(13, "Permission denied", "/data/kv"),
        socket.gaierror(-2, "Name or service not known"),
        ssl.SSLError(1, "CERTIFICATE_VERIFY_FAILED"),
        OddError(7, hint="again"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_arrives_with_its_class_and_its_text(error: Exception) -> None:
    arrived = across(error)
    assert str(arrived) == str(error)
    assert type(arrived) is type(error)


def test_what_cannot_be_made_again_is_said_by_name() -> None:
    refused = ConnectionRefusedError(111, "Connection refused")
    group = ExceptionGroup("unhandled errors in a TaskGroup", [refused])
    assert across(group).args == (
        "ExceptionGroup: unhandled errors in a TaskGroup (1 sub-exception): "
        "ConnectionRefusedError: [Errno 111] Connection refused",
    )
    assert type(across(group)) is TierError


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (StubbornError("db", 5432), ConnectionError),
        (UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"), UnicodeError),
    ],
)
def test_a_base_will_do_where_the_class_will_not(error: Exception, base: type[Exception]) -> None:
    arrived = across(error)
    assert type(arrived) is base
    assert str(arrived) == str(error)
