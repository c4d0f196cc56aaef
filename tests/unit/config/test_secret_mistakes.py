"""A message about a mistake shows no secret, even one written into the wrong option."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest

from kvtier_sdk import ConfigError, TieringConfig

URL = "redis://u:hunter2@h"


def complaint(options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        TieringConfig.from_dict({"slots": 8, **options}, where="kv.toml")
    shown = "".join(traceback.format_exception(caught.value))
    assert "hunter2" not in shown
    return str(caught.value)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"type": URL}, "option 'tiers[0].type' is a URL; write it as option 'tiers[0].url'"),
        (
            {"type": "memory", "backend": URL},
            "option 'tiers[0].backend' is a URL; write it as option 'tiers[0].url'",
        ),
        (
            {"type": "memory", "store_policy": URL},
            "option 'tiers[0].store_policy': no store policy",
        ),
        ({"type": "memory", "runner": URL}, "option 'tiers[0].runner' is 'redis://u:***@h' but"),
        ({"type": [URL]}, "option 'tiers[0].type' is ['redis://u:***@h'] but should be text"),
        (
            "memory:?password=hunter2&capacity=1X",
            "option 'tiers[0].capacity': '1X': unit 'X' is none of",
        ),
        (
            "memory:?capcity=1&password=hunter2",
            "unknown option 'tiers[0].capcity'; did you mean 'capacity'?",
        ),
    ],
)
def test_no_secret_is_in_what_is_said_of_a_tier(entry: Any, message: str) -> None:
    assert f"kv.toml: {message}" in complaint({"tiers": [entry]})


@pytest.mark.parametrize("option", ["policy", "chunk_bytes", "slots", "namespace", "polcy"])
def test_no_secret_is_in_what_is_said_of_the_rest(option: str) -> None:
    assert f"option '{option}'" in complaint({option: URL})


@pytest.mark.parametrize(
    "url",
    [
        "memory://user:hunter2@host/0",
        "memory://:hunter2@host:port/",
        "memory://user:hunter2@[host/",
        "nobody://user:hunter2@host",
        "my_tier://user:hunter2@host",
    ],
)
def test_no_secret_is_in_what_is_said_of_a_url(url: str) -> None:
    complaint({"tiers": [url]})
    complaint({"tiers": [{"type": "memory", "url": url}]})


def test_a_secret_fact_is_not_shown() -> None:
    complaint({"namespace": {"api_token": "hunter2", "x": {1}}})
    config = TieringConfig.from_dict({"slots": 8, "namespace": {"api_token": "hunter2"}})
    assert "hunter2" not in repr(config)
    assert config.to_dict()["namespace"] == {"api_token": "***"}
    assert config.to_dict(secrets=True)["namespace"] == {"api_token": "hunter2"}


@pytest.mark.parametrize(
    "line", ["!hunter2", "*hunter2", "!hunter2!x", "!!int hunter2", "%hunter2", "'hunter2"]
)
def test_no_secret_is_in_what_is_said_of_yaml(tmp_path: Path, line: str) -> None:
    file = tmp_path / "kv.yaml"
    file.write_text(f"slots: 8\npassword: {line}\n")
    with pytest.raises(ConfigError, match=r"kv\.yaml: not YAML.*; a value .* needs quotes") as told:
        TieringConfig.from_file(file)
    assert "hunter2" not in str(told.value)
