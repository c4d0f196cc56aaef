from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier_sdk import ConfigError, TieringConfig, TierSpec
from kvtier_vllm.options import SecondaryTierEntry


def complaint(*tiers: str) -> str:
    try:
        TieringConfig.from_dict({"slots": 4, "tiers": list(tiers)}, where="kv")
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("tiers", "path", "said"),
    [
        (
            ("file:///a", "file:///a/b?name=n"),
            "tiers[1]",
            "keeps its chunks in file:///a/b, inside",
        ),
        (("file:///a/b", "file:///a?name=n"), "tiers[1]", "keeps its chunks in file:///a, around"),
        (("memory:", "file:///a", "file:///a/b?name=n"), "tiers[2]", "where 'file' (tiers[1])"),
        (("file:///", "file:///a?name=n"), "tiers[1]", "inside file:///"),
        (("file:///a?fsync=true", "file:///a/?name=n"), "tiers[1]", "other options (fsync)"),
        (("s3://b/p", "s3://b/p/q?name=n"), "tiers[1]", "keeps its chunks in s3:///b/p/q, inside"),
        (("redis://h:1/0", "redis://h:1?ttl=1h&name=n"), "tiers[1]", "other options (ttl)"),
    ],
)
def test_a_clash_names_the_later_tier(tiers: tuple[str, ...], path: str, said: str) -> None:
    text = complaint(*tiers)
    assert text.startswith(f"kv: option '{path}': 'n' keeps its chunks in ")
    assert said in text
    assert "\n" not in text


@pytest.mark.parametrize(
    "tiers",
    [
        ("file:///a", "file:///ab?name=n"),
        ("file:///a", "file:///a?name=n&retries=5"),
        ("memory:", "memory:?name=n&capacity=1GiB"),
        ("redis://h:1/0", "redis://h:1/1?name=n"),
        ("redis://h:1/0", "redis://h:2/0?name=n"),
        ("redis://h:1/0?prefix=a", "redis://h:1/0?prefix=a/b&name=n"),
        ("s3://b/p", "s3://b/pq?name=n"),
        ("s3://b/p", "s3://b/p/q?name=n&endpoint=http://h:1"),
        ("redis+unix:///run/a", "redis+unix:///run/a/b?name=n"),
    ],
)
def test_tiers_apart_and_the_same_tier_twice_are_no_clash(tiers: tuple[str, ...]) -> None:
    assert complaint(*tiers) == ""


def test_a_root_behind_a_symlink_is_the_same_root(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    assert "inside" in complaint(f"file://{tmp_path}/real", f"file://{tmp_path}/link/b?name=n")


def test_two_backends_of_one_place_clash(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = TierSpec.from_url("memory:?name=n")
    monkeypatch.setattr(type(memory.config), "location", lambda self: "file:///a")
    with pytest.raises(ConfigError, match="other options \\(another backend\\)"):
        TieringConfig.from_dict({"slots": 4, "tiers": ["file:///a", memory]})


def test_it_is_told_under_vllms_manager_too() -> None:
    entries: list[dict[str, Any]] = [
        {"type": "kvtier", "url": "file:///a"},
        {"type": "fs"},
        {"type": "kvtier", "url": "file:///a/b?name=n"},
    ]
    with pytest.raises(ConfigError, match=r"option 'secondary_tiers\[2\]': 'n' keeps .* inside"):
        SecondaryTierEntry.read_all(entries)
