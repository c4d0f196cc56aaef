from __future__ import annotations

from pathlib import Path

import pytest

from kvtier_sdk import ConfigError, UnknownBackendError
from kvtier_sdk.cli.targets import read_target

KV = """
slots = 8
[[tiers]]
url = "memory:?name=near"
[[tiers]]
url = "redis://:hunter2@cache:6379/0"
"""


@pytest.fixture
def kv(tmp_path: Path) -> str:
    path = tmp_path / "kv.toml"
    path.write_text(KV)
    return str(path)


def test_a_url_is_one_tier_and_no_pool() -> None:
    target = read_target("file:///data/kv?capacity=1GiB")
    assert (target.is_url, target.only_tier.backend, target.config.slots) == (True, "file", None)


def test_a_url_may_be_longer_than_a_files_name() -> None:
    url = f"s3://kv/chunks?access_key_id={'a' * 300}&secret_access_key={'b' * 300}"
    assert read_target(url).only_tier.backend == "s3"


def test_a_configuration_is_all_its_tiers(kv: str) -> None:
    target = read_target(kv)
    assert (target.is_url, target.engine, target.config.slots) == (False, None, 8)
    assert [spec.name for spec in target.config.tiers] == ["near", "redis"]


def test_a_name_behind_a_hash_is_one_of_them(kv: str) -> None:
    assert read_target(f"{kv}#redis").only_tier.backend == "redis"


def test_the_one_tier_of_several_has_to_be_named(kv: str) -> None:
    with pytest.raises(ConfigError) as error:
        _ = read_target(kv).only_tier
    assert f"2 tiers, 'near', 'redis'; name one, as in '{kv}#near'" in str(error.value)


def test_an_unknown_name_says_which_there_are(kv: str) -> None:
    with pytest.raises(ConfigError, match="no tier is named 'rediss'; did you mean 'redis'"):
        read_target(f"{kv}#rediss")


def test_a_file_whose_name_has_a_hash_is_a_file(tmp_path: Path) -> None:
    path = tmp_path / "kv#2.toml"
    path.write_text(KV)
    assert len(read_target(str(path)).config.tiers) == 2


@pytest.mark.parametrize(
    ("written", "error", "says"),
    [
        ("nope.toml", ConfigError, "nope.toml: No such file"),
        ("mine://host", UnknownBackendError, "mine"),
        ("file:///data/kv?capacty=1GiB", ConfigError, "did you mean 'capacity'"),
    ],
)
def test_what_is_wrong_is_said(written: str, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        read_target(written)
