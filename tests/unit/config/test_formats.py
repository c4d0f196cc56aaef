"""A configuration means the same as a table, as TOML, JSON or YAML, and read back."""

from __future__ import annotations

import json
import string
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from kvtier_sdk import ConfigError, TieringConfig

WHOLE: dict[str, Any] = {
    "pool_bytes": "4GiB",
    "chunk_bytes": "64KiB",
    "policy": "arc",
    "store_reserve": "5%",
    "recompute": "250ms",
    "verify": False,
    "shutdown_timeout": "3s",
    "namespace": {"model": "m", "groups": [1, 2]},
    "tiers": [
        {"type": "memory", "name": "warm", "capacity": "1GiB", "store_policy": "after_hits:2"},
        {"url": "file:///data/kv?min_free=5%", "load_deadline": "2s", "offload_policy": "request"},
    ],
}


def test_a_whole_one_is_read() -> None:
    config = TieringConfig.from_dict(WHOLE)
    assert (config.pool_bytes, config.chunk_bytes, config.store_reserve) == (2**32, 2**16, 0.05)
    assert (config.recompute_s, config.shutdown_timeout_s, config.verify) == (0.25, 3.0, False)
    warm, file = config.tiers
    assert (warm.name, warm.runner.store_policy) == ("warm", "after_hits:2")
    assert (file.name, file.runner.load_deadline_s, file.runner.offload_policy) == (
        "file",
        2.0,
        "request",
    )


def _quoted(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_quoted(inner)}" for name, inner in value.items()) + "}"
    return json.dumps(value, ensure_ascii=False) if not isinstance(value, list) else _list(value)


def _list(values: list[Any]) -> str:
    return "[" + ", ".join(map(_quoted, values)) + "]"


def write(path: Path, options: Mapping[str, Any]) -> Path:
    """Write options in the format of the suffix."""
    if path.suffix == ".toml":
        path.write_text("".join(f"{name} = {_quoted(value)}\n" for name, value in options.items()))
    elif path.suffix == ".json":
        path.write_text(json.dumps(options))
    else:
        path.write_text(yaml.safe_dump(dict(options)))
    return path


@pytest.mark.parametrize("suffix", [".toml", ".json", ".yaml", ".yml", ".TOML"])
def test_every_format_means_the_same(tmp_path: Path, suffix: str) -> None:
    path = write((tmp_path / "kv.x").with_suffix(suffix.lower()), WHOLE)
    path = path.rename(path.with_suffix(suffix))
    assert TieringConfig.from_file(path) == TieringConfig.from_dict(WHOLE)
    assert TieringConfig.from_file(str(path)) == TieringConfig.from_dict(WHOLE)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("kv.toml", "slots = \nx = 1", "not TOML: Invalid value (at line 1, column 9)"),
        ("kv.toml", "a = 1\na = 2\nb = 3", "not TOML: Cannot overwrite a value (at line 2"),
        ("kv.json", '{"slots": 3]', "not JSON: Expecting ',' delimiter: line 1 column 12"),
        ("kv.json", '{"slots": 3, "slots": 4}', "option 'slots' is given twice"),
        ("kv.yaml", "a: [3\nx: }", "not YAML (at line 2, column 2); a value that begins"),
        ("kv.yaml", "slots: 3\nslots: 4", "option 'slots' is given twice"),
        ("kv.yaml", "slots: 3\n? [1]\n: 2", "not YAML (at line 2, column 3)"),
        ("kv.yaml", "a: \x01", "not YAML; a value that begins"),
        ("kv.yaml", "a: !!bool 7", "not YAML; a value that begins"),
        ("kv.toml", "# nothing\n", "is empty; see docs/configuration.md for what it holds"),
        ("kv.json", "{}", "is empty; see docs/configuration.md for what it holds"),
        ("kv.yaml", "", "is empty; see docs/configuration.md for what it holds"),
        ("kv.json", "[1]", "holds a list but should hold a table of options"),
        ("kv.yaml", "word", "holds text but should hold a table of options"),
        ("kv.json", " " * 2**20 + "{}", "is longer than 1048576 bytes"),
        ("kv.ini", "x", "unknown format '.ini'; allowed: .json, .toml, .yaml, .yml"),
        ("kv.tml", "x", "unknown format '.tml'; did you mean '.toml'? allowed: "),
        ("kv.json", '{"polcy": 1}', "unknown option 'polcy'; did you mean 'policy'? allowed: "),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_the_reason(
    tmp_path: Path, name: str, text: str, message: str
) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        TieringConfig.from_file(path)
    assert str(caught.value).startswith(f"{path}: {message}")
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv\.toml: No such file or directory$"):
        TieringConfig.from_file(tmp_path / "kv.toml")
    (tmp_path / "kv.json").mkdir()
    with pytest.raises(ConfigError, match=r"kv\.json: Is a directory$"):
        TieringConfig.from_file(tmp_path / "kv.json")
    (tmp_path / "kv.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"kv\.yaml: not YAML: 'utf-8' codec can't decode"):
        TieringConfig.from_file(tmp_path / "kv.yaml")


def test_without_pyyaml_a_yaml_file_says_what_to_install(tmp_path: Path) -> None:
    path = write(tmp_path / "kv.yaml", {"slots": 3})
    code = f"""
import sys
sys.modules["yaml"] = None
from kvtier_sdk import TieringConfig
try:
    TieringConfig.from_file({str(path)!r})
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"{path}: YAML needs PyYAML: pip install 'kvtier-sdk[yaml]'\n"


words = st.text(string.ascii_lowercase, min_size=1, max_size=8)
sizes = st.one_of(
    st.integers(1, 2**50),
    st.builds("{}{}".format, st.integers(1, 999), st.sampled_from(["KiB", "MB", " GiB"])),
)
times = st.one_of(
    st.integers(1, 100), st.builds("{}{}".format, st.integers(1, 99), st.sampled_from(["ms", "s"]))
)
shares = st.one_of(st.floats(0.01, 0.99), st.builds("{}%".format, st.integers(1, 99)))
facts = st.dictionaries(words, st.recursive(st.one_of(words, st.integers()), st.lists), max_size=3)
common = {
    "runner": st.sampled_from(["auto", "thread"]),
    "store_policy": st.sampled_from(["through", "on_evict", "after_hits:3"]),
    "offload_policy": st.sampled_from(["chunk", "request"]),
    "required": st.booleans(),
    "open_deadline": times,
    "lookup_deadline": times,
    "load_deadline": times,
    "store_deadline": times,
    "retries": st.integers(0, 100),
    "retry_delay": times,
    "concurrency": st.integers(1, 1024),
    "max_batch": sizes,
    "max_queue": sizes,
    "breaker_failures": st.integers(1, 10_000),
    "breaker_window": st.integers(1, 10_000),
    "probe_interval": st.just("10ms"),
    "max_probe_interval": st.just("2m"),
}
tiers = st.one_of(
    st.fixed_dictionaries(
        {"type": st.just("memory")},
        optional={"capacity": sizes, "latency": times, "bandwidth": sizes, **common},
    ),
    st.fixed_dictionaries(
        {"type": st.just("file"), "root": st.just("/data/kv")},
        optional={
            "capacity": sizes,
            "min_free": st.one_of(sizes, shares),
            "direct_io": st.sampled_from(["auto", "on", "off"]),
            "fsync": st.booleans(),
            **common,
        },
    ),
    st.builds("memory:?capacity={}".format, st.integers(1, 2**40)),
)


@st.composite
def configurations(draw: st.DrawFn) -> dict[str, Any]:
    """Generate options as users write them."""
    options = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "chunk_bytes": sizes,
                "policy": st.sampled_from(["prefix", "lru", "arc"]),
                "store_reserve": shares,
                "recompute": times,
                "verify": st.booleans(),
                "shutdown_timeout": times,
                "namespace": facts,
            },
        )
    )
    if draw(st.booleans()):
        options["slots"] = draw(st.integers(1, 2**40))
    else:
        options["pool_bytes"] = draw(st.one_of(sizes, shares))
    entries = draw(st.lists(tiers, max_size=3))
    options["tiers"] = [_apart(entry, index) for index, entry in enumerate(entries)]
    return options


def _apart(entry: Any, index: int) -> Any:
    """Return a tier entry with a name and a place that no other has."""
    if isinstance(entry, str):
        return f"{entry}&name=t{index}"
    root = {"root": f"{entry['root']}{index}"} if "root" in entry else {}
    return {**entry, **root, "name": f"t{index}"}


@settings(max_examples=30)
@given(configurations(), st.sampled_from([".toml", ".json", ".yaml"]))
def test_a_valid_one_survives_every_way_round(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any], suffix: str
) -> None:
    config = TieringConfig.from_dict(options)
    plain = config.to_dict(secrets=True)
    assert TieringConfig.from_dict(plain) == config
    assert plain.keys() == options.keys()
    path = tmp_path_factory.getbasetemp() / f"round{suffix}"
    assert TieringConfig.from_file(write(path, options)) == config
    assert TieringConfig.from_file(write(path, plain)) == config
