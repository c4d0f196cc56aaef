from __future__ import annotations

import json
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
    TierAuthError,
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
    """Options of every type that the SDK can send to a tier's process."""

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

    def __str__(self) -> str:
        return "try again"


def across(error: BaseException) -> BaseException:
    return read_error(json.loads(json.dumps(write_error(error))))


@pytest.mark.parametrize(
    ("error", "arrives"),
    [
        (ConfigError("option 'bucket' names none"), ConfigError("option 'bucket' names none")),
        (ExpiredError("Ada", 3), TierAuthError("the key of Ada expired 3 days ago")),
        (KeyError("ttl"), TierError("KeyError: 'ttl'")),
        (OddError(7), TierError("OddError: try again")),
        (
            ExceptionGroup("unhandled", [ConnectionRefusedError(111, "Connection refused")]),
            TierError(
                "ExceptionGroup: unhandled (1 sub-exception): "
                "ConnectionRefusedError: [Errno 111] Connection refused"
            ),
        ),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_arrives_as_the_sdks_nearest(error: Exception, arrives: Exception) -> None:
    arrived = across(error)
    assert (type(arrived), str(arrived)) == (type(arrives), str(arrives))


def test_what_an_error_says_of_its_tier_arrives() -> None:
    error = ExpiredError("Ada", 3)
    error.tier, error.operation = "far", "open"
    arrived = across(error)
    assert vars(arrived) == {"retryable": False, "days": 3, "tier": "far", "operation": "open"}
    assert str(arrived) == str(error) == "far open: the key of Ada expired 3 days ago"
