from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

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
    if isinstance(value, list):
        return "[" + ", ".join(map(_quoted, value)) + "]"
    return json.dumps(value, ensure_ascii=False)


def write(path: Path, options: Mapping[str, Any]) -> Path:
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
        ("kv.json", "[1]", "should hold a table of options"),
        ("kv.yaml", "word", "should hold a table of options"),
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


def test_without_pyyaml_a_yaml_file_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "kv.yaml", {"slots": 3})
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ConfigError) as told:
        TieringConfig.from_file(path)
    assert str(told.value) == f"{path}: YAML needs PyYAML: pip install 'kvtier-sdk[yaml]'"


@pytest.mark.parametrize(
    "options",
    [
        WHOLE,
        {"slots": 8, "tiers": ["memory:?capacity=1GiB&required=yes&max_probe_interval=2m"]},
        {
            "pool_bytes": "5%",
            "tiers": [{"type": "file", "root": "/kv", "min_free": "5GiB", "direct_io": "off"}],
        },
    ],
)
def test_what_is_read_can_be_written_and_read_again(options: dict[str, Any]) -> None:
    config = TieringConfig.from_dict(options)
    plain = config.to_dict(secrets=True)
    assert plain.keys() == options.keys()
    assert TieringConfig.from_dict(json.loads(json.dumps(plain))) == config
