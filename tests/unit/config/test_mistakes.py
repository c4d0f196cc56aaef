from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvtier_sdk import BackendError, ConfigError, MemoryTierConfig, RunnerOptions, TieringConfig

TOP = ", ".join(sorted(TieringConfig.option_names()))
COMMON_NAMES = {"type", "backend", "name", "url", *RunnerOptions.option_names()}
COMMON = ", ".join(sorted(COMMON_NAMES))
MEMORY = ", ".join(sorted(COMMON_NAMES.union(MemoryTierConfig.option_names())))
NO_POOL = "option 'slots' or 'pool_bytes' is missing; it says how big the host pool is, for "
NO_POOL += "example pool_bytes '4GiB' or '5%'"

#: Messages are compared without their lists of backends, which depend on installed packages.
MISTAKES: list[tuple[Any, str]] = [
    ({}, NO_POOL),
    ({"pool_bytes": 1}, "options 'slots' and 'pool_bytes' are both given; leave one"),
    (["slots"], "should be a table of options"),
    ({1: 2}, "option '1' has a name that is not text"),
    ({"polcy": "lru"}, f"unknown option 'polcy'; did you mean 'policy'? allowed: {TOP}"),
    ({"chunk_bytes": 0}, "option 'chunk_bytes' is 0 but should be greater than 0"),
    ({"recompute": "5"}, "option 'recompute': '5' has no unit; write for example '250ms'"),
    ({"store_reserve": "100%"}, "option 'store_reserve' is 1.0 but should be less than 1"),
    ({"namespace": ["x"]}, "option 'namespace' is ['x'] but should be a table"),
    (
        {"namespace": {"model": {1}}},
        "option 'namespace.model' is {1} but should be text, a number, true or false, or a list or "
        "table of them",
    ),
    (
        {"policy": "lrv"},
        "option 'policy': no policy 'lrv'; did you mean 'lru'? installed: arc, lru, returns",
    ),
    ({"policy": 5}, "option 'policy' is 5 but should be text"),
    ({"tiers": "memory:"}, "option 'tiers' should be a list"),
    ({"tiers": [5]}, "option 'tiers[0]' should be a table of options"),
    (
        {"tiers": [{"tpe": "memory"}]},
        f"unknown option 'tiers[0].tpe'; did you mean 'type'? allowed: {COMMON}",
    ),
    (
        {"tiers": ["memory:", {"type": "memory"}]},
        "option 'tiers[1].name': two tiers are named 'memory', this one and tiers[0]; name one "
        "of them, for example 'memory-2'",
    ),
    (
        {"tiers": ["memory:", {"type": "memory", "capcity": 1}]},
        f"unknown option 'tiers[1].capcity'; did you mean 'capacity'? allowed: {MEMORY}",
    ),
    (
        {"tiers": ["memory:?capcity=1"]},
        f"unknown option 'tiers[0].capcity'; did you mean 'capacity'? allowed: {MEMORY}",
    ),
    (
        {"tiers": [{"memory": None}]},
        "option 'tiers[0]' is a table without a 'type'; if it is meant as a URL, in YAML write "
        "quotes: 'memory:'",
    ),
]
#: Each entry: a tier's options, the option with a mistake, and text that the message contains.
TIER_MISTAKES: list[tuple[Any, str, str]] = [
    ({}, "type", " is missing; it names the backend"),
    ({"type": "kvtier"}, "backend", " is missing; it names the backend"),
    ({"type": "memry"}, "type", ": no backend 'memry'; did you mean 'memory'? installed: ..."),
    (
        {"type": "memory", "url": "file:///x"},
        "url",
        " begins with 'file:', which is not the backend 'memory' that 'tiers[0].type' names",
    ),
    ({"type": "memory", "backend": "file"}, "backend", " is 'file', but 'type' is 'memory'"),
    ("memory:?name=", "name", " is empty; leave it out, or give the tier a name"),
    (
        "memory:?name=host",
        "name",
        ": two tiers are named 'host', this one and the host pool; name one of them, for "
        "example 'host-2'",
    ),
    ({"url": 5}, "url", " is 5 but should be text"),
    (
        {"url": "memory:?capacity=1KiB", "capacity": "2KiB"},
        "capacity",
        " is given in the URL and beside it",
    ),
    (
        {"type": "kvtier", "backend": "memory", "url": "nobodys:"},
        "url",
        " begins with 'nobodys:', which is not the backend 'memory' that 'tiers[0].backend' names",
    ),
    ("memory:?runner=cloud", "runner", " is 'cloud' but should be 'auto', 'thread' or 'process'"),
    (
        "memory:?store_policy=thru",
        "store_policy",
        ": no store policy 'thru'; did you mean 'through'? installed: after_hits, of_tenant, "
        "on_evict, through",
    ),
    (
        "memory:?codec=aes-gcm:/nowhere/chunk.keys",
        "codec",
        ": codec 'aes-gcm:/nowhere/chunk.keys': cannot read the key file: No such file or "
        "directory",
    ),
    (
        "memory:?probe_interval=60s",
        "max_probe_interval",
        " is 30 s but should be at least 'probe_interval', which is 60 s",
    ),
]


def complaint(options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        TieringConfig.from_dict(options, where="kv.toml")
    assert not isinstance(caught.value, BackendError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    MISTAKES
    + [({"tiers": [tier]}, f"option 'tiers[0].{at}'{said}") for tier, at, said in TIER_MISTAKES],
)
def test_a_mistake_is_told_with_the_path_of_its_option(options: Any, message: str) -> None:
    if isinstance(options, dict) and options:
        options = {"slots": 8, **options}
    told = complaint(options)
    assert told.startswith(f"kv.toml: {message.removesuffix('...')}")
    assert "\n" not in told


def test_each_mistake_has_a_line_of_its_own() -> None:
    tiers = [{"type": "memory", "capcity": 1}, {"type": "zzz"}]
    lines = complaint({"slots": 0, "polcy": "x", "tiers": tiers}).splitlines()
    assert [line.partition("; ")[0].partition(" is ")[0] for line in lines] == [
        "kv.toml: option 'slots'",
        "kv.toml: unknown option 'polcy'",
        "kv.toml: unknown option 'tiers[0].capcity'",
        "kv.toml: option 'tiers[1].type': no backend 'zzz'",
    ]


def test_a_secret_fact_is_not_shown() -> None:
    assert "hunter2" not in complaint({"slots": 8, "namespace": {"api_token": "hunter2", "x": {1}}})
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
