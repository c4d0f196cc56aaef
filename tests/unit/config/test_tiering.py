"""The whole configuration: what it takes, and what it says of each mistake."""

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

from kvtier_sdk import (
    BackendError,
    ConfigError,
    HostPool,
    Namespace,
    TieringConfig,
    TieringManager,
    TierSpec,
    open_manager,
    open_pool,
)
from kvtier_sdk.pool.limits import total_memory_bytes

TOP = "chunk_bytes, namespace, policy, pool_bytes, recompute, shutdown_timeout, slots, "
TOP += "store_reserve, tiers, verify"
MEMORY = "backend, bandwidth, breaker_failures, breaker_window, capacity, concurrency, latency, "
MEMORY += "load_deadline, lookup_deadline, max_batch, max_probe_interval, max_queue, name, "
MEMORY += "offload_policy, probe_interval, retries, retry_delay, runner, store_deadline, "
MEMORY += "store_policy, type, url"
COMMON = MEMORY.replace("bandwidth, ", "").replace("capacity, ", "").replace("latency, ", "")
UNITS = "B, KiB, MiB, GiB, TiB, PiB, EiB, KB, MB, GB, TB, PB, EB"
NO_POOL = "option 'slots' or 'pool_bytes' is missing; it says how big the host pool is, for "
NO_POOL += "example pool_bytes '4GiB' or '5%'"

#: Names of backends are what is installed, so messages that list them are compared up to there.
MISTAKES: list[tuple[str, Any, str]] = [
    ("nothing", {}, NO_POOL),
    ("both sizes", {"pool_bytes": 1}, "options 'slots' and 'pool_bytes' are both given; leave one"),
    ("no table", ["slots"], "should be a table of options, not a list"),
    ("a number for a name", {1: 2}, "option '1' is no text name"),
    ("unknown", {"polcy": "lru"}, f"unknown option 'polcy'; did you mean 'policy'? allowed: {TOP}"),
    ("far off", {"x": 1}, f"unknown option 'x'; allowed: {TOP}"),
    (
        "unit",
        {"chunk_bytes": "64KX"},
        f"option 'chunk_bytes': '64KX': unit 'KX' is none of {UNITS}",
    ),
    ("zero", {"chunk_bytes": 0}, "option 'chunk_bytes' is 0 but should be greater than 0"),
    ("no slots", {"slots": 0}, "option 'slots' is 0 but should be greater than or equal to 1"),
    ("true is no number", {"slots": True}, "option 'slots': True is not a whole number"),
    ("half a slot", {"slots": 2.5}, "option 'slots': 2.5 is not a whole number"),
    (
        "no unit",
        {"recompute": "5"},
        "option 'recompute': '5' has no unit; write for example '250ms'",
    ),
    ("all", {"store_reserve": "100%"}, "option 'store_reserve' is 1.0 but should be less than 1"),
    ("more", {"store_reserve": "110%"}, "option 'store_reserve': '110%' is outside 0% to 100%"),
    ("flag", {"verify": "maybe"}, "option 'verify': 'maybe' is neither true nor false"),
    ("facts", {"namespace": ["x"]}, "option 'namespace' is ['x'] but should be a table"),
    (
        "fact",
        {"namespace": {"model": {1}}},
        "option 'namespace': should hold text, numbers, true or false, and lists and tables of "
        "them",
    ),
    (
        "policy",
        {"policy": "lrv"},
        "option 'policy': no policy 'lrv'; did you mean 'lru'? installed: arc, fifo, lru",
    ),
    ("policy's kind", {"policy": 5}, "option 'policy' is 5 but should be text"),
    ("one tier", {"tiers": "memory:"}, "option 'tiers' should be a list, not text"),
    ("no tier", {"tiers": [5]}, "option 'tiers[0]' should be a table of options, not a number"),
    ("no type", {"tiers": [{}]}, "option 'tiers[0].type' is missing; it names the backend"),
    (
        "no backend",
        {"tiers": [{"type": "kvtier"}]},
        "option 'tiers[0].backend' is missing; it names the backend",
    ),
    (
        "misspelt type",
        {"tiers": [{"tpe": "memory"}]},
        f"unknown option 'tiers[0].tpe'; did you mean 'type'? allowed: {COMMON}",
    ),
    (
        "type",
        {"tiers": [{"type": "memry"}]},
        "option 'tiers[0].type': no backend 'memry'; did you mean 'memory'? installed: ...",
    ),
    (
        "backend",
        {"tiers": [{"type": "kvtier", "backend": "memry"}]},
        "option 'tiers[0].backend': no backend 'memry'; did you mean 'memory'? installed: ...",
    ),
    (
        "scheme",
        {"tiers": ["memory:", "memry:"]},
        "option 'tiers[1].url': no backend 'memry'; did you mean 'memory'? installed: ...",
    ),
    (
        "no URL",
        {"tiers": ["memory"]},
        "option 'tiers[0].url' cannot be used: tier URL 'memory' names no backend; write for "
        "example 'file:///data/kv' or 'memory:'",
    ),
    (
        "underscore",
        {"tiers": ["my_tier:"]},
        "option 'tiers[0].url' cannot be used: tier URL 'my_tier:': a URL's scheme cannot hold "
        "'_'; write 'my-tier:'",
    ),
    (
        "contradiction",
        {"tiers": [{"type": "memory", "url": "file:///x"}]},
        "option 'tiers[0].url' begins with 'file:', which is not the backend 'memory' that "
        "'tiers[0].type' names",
    ),
    (
        "two backends",
        {"tiers": [{"type": "memory", "backend": "file"}]},
        "option 'tiers[0].backend' is 'file', but 'type' is 'memory'",
    ),
    (
        "a host",
        {"tiers": ["memory://host"]},
        "option 'tiers[0].url' cannot be used: memory: takes no host and no path; write "
        "'memory:?option=value'",
    ),
    (
        "no name",
        {"tiers": ["memory:?name="]},
        "option 'tiers[0].name' is empty; leave it out, or give the tier a name",
    ),
    (
        "the host pool's name",
        {"tiers": ["memory:?name=host"]},
        "option 'tiers[0].name': two tiers are named 'host', this one and the host pool; name "
        "one of them, for example 'host-2'",
    ),
    ("kinds", {"tiers": [{"url": 5}]}, "option 'tiers[0].url' is 5 but should be text"),
    (
        "twice",
        {"tiers": [{"url": "memory:?capacity=1KiB", "capacity": "2KiB"}]},
        "option 'tiers[0].capacity' is given in the URL and beside it",
    ),
    (
        "one name",
        {"tiers": ["memory:", {"type": "memory"}]},
        "option 'tiers[1].name': two tiers are named 'memory', this one and tiers[0]; name one "
        "of them, for example 'memory-2'",
    ),
    (
        "unknown in a tier",
        {"tiers": ["memory:", {"type": "memory", "capcity": 1}]},
        f"unknown option 'tiers[1].capcity'; did you mean 'capacity'? allowed: {MEMORY}",
    ),
    (
        "unknown in a URL",
        {"tiers": ["memory:?capcity=1"]},
        f"unknown option 'tiers[0].capcity'; did you mean 'capacity'? allowed: {MEMORY}",
    ),
    (
        "unit in a tier",
        {"tiers": ["memory:", {"type": "memory", "name": "b", "capacity": "1 gig"}]},
        f"option 'tiers[1].capacity': '1 gig': unit 'gig' is none of {UNITS}",
    ),
    (
        "runner",
        {"tiers": [{"type": "memory", "runner": "cloud"}]},
        "option 'tiers[0].runner' is 'cloud' but should be 'auto', 'thread' or 'process'",
    ),
    (
        "offload policy",
        {"tiers": [{"type": "memory", "offload_policy": "requests"}]},
        "option 'tiers[0].offload_policy' is 'requests' but should be 'chunk' or 'request'",
    ),
    (
        "store policy",
        {"tiers": [{"type": "memory", "store_policy": "thru"}]},
        "option 'tiers[0].store_policy': no store policy 'thru'; did you mean 'through'? "
        "installed: after_hits, on_evict, through",
    ),
    (
        "store policy's argument",
        {"tiers": [{"type": "memory", "store_policy": "after_hits"}]},
        "option 'tiers[0].store_policy': store policy 'after_hits': needs a number of hits from "
        "1: 'after_hits:2'",
    ),
    (
        "two options",
        {"tiers": [{"type": "memory", "probe_interval": "60s"}]},
        "option 'tiers[0].max_probe_interval' is 30 s but should be at least 'probe_interval', "
        "which is 60 s",
    ),
    (
        "YAML's trap",
        {"tiers": [{"memory": None}]},
        "option 'tiers[0]' is a table without a 'type'; if it is meant as a URL, in YAML write "
        "quotes: 'memory:'",
    ),
]


def complaint(options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        TieringConfig.from_dict(options, where="kv.toml")
    assert not isinstance(caught.value, BackendError)
    return str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"), [case[1:] for case in MISTAKES], ids=[case[0] for case in MISTAKES]
)
def test_a_mistake_is_told_with_the_path_of_its_option(options: Any, message: str) -> None:
    if isinstance(options, dict) and options:
        options = {"slots": 8, **options}
    told = complaint(options)
    if message.endswith("..."):
        assert told.startswith(f"kv.toml: {message[:-3]}")
        assert "\n" not in told
    else:
        assert told.startswith(f"kv.toml: {message}")
        # What is cut off in the table above is the end of a sentence.
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


def test_a_backend_that_is_missing_is_kept_as_the_cause() -> None:
    with pytest.raises(ConfigError) as caught:
        TierSpec.from_options({"type": "memory", "capcity": 1}, where="x", path="tiers[3]")
    assert "unknown option 'tiers[3].capcity'" in str(caught.value)


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
        ("kv.json", '{"slots": 3]', "not JSON: Expecting ',' delimiter (at line 1, column 12)"),
        ("kv.json", '{"slots": 3, "slots": 4}', "option 'slots' is given twice"),
        ("kv.yaml", "a: [3\nx: }", "not YAML: expected ',' or ']', but got ':' (at line 2"),
        ("kv.yaml", "slots: 3\nslots: 4", "option 'slots' is given twice (at line 2)"),
        ("kv.yaml", "slots: 3\n? [1]\n: 2", "not YAML: found unhashable key (at line 2, column 3)"),
        ("kv.yaml", "a: \x01", "not YAML: it holds a character that YAML does not allow"),
        ("kv.toml", "# nothing\n", "is empty; see docs/configuration.md for what it holds"),
        ("kv.json", " ", "is empty; see docs/configuration.md for what it holds"),
        ("kv.json", "{}", "is empty; see docs/configuration.md for what it holds"),
        ("kv.yaml", "", "is empty; see docs/configuration.md for what it holds"),
        ("kv.json", "[1]", "holds a list but should hold a table of options"),
        ("kv.yaml", "word", "holds text but should hold a table of options"),
        ("kv.json", "true", "holds true or false but should hold a table of options"),
        ("kv.toml", "slots = " + "9" * 5000, "holds a number with too many digits"),
        ("kv.json", "[" * 100_000, "is nested too deeply"),
        ("kv.ini", "x", "the suffix '.ini' says no known format; allowed: .json, .toml, .yaml, "),
        ("kv.tml", "x", "the suffix '.tml' says no known format; did you mean '.toml'? allowed: "),
        ("kv", "x", "the suffix '' says no known format; allowed: .json, .toml, .yaml, .yml"),
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
    with pytest.raises(ConfigError, match=r"kv\.yaml: is not UTF-8 text$"):
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
    """Options as people write them."""
    options = draw(
        st.fixed_dictionaries(
            {},
            optional={
                "chunk_bytes": sizes,
                "policy": st.sampled_from(["lru", "arc", "fifo"]),
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
    """A tier with a name and a place of its own."""
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


def typos(word: str) -> set[str]:
    """One letter is missing, swapped with the next, wrong, or too many."""
    cuts = [(word[:index], word[index:]) for index in range(len(word) + 1)]
    letters = "eqs_"
    return {
        *(head + tail[1:] for head, tail in cuts if tail),
        *(head + tail[1] + tail[0] + tail[2:] for head, tail in cuts if len(tail) > 1),
        *(head + letter + tail[1:] for head, tail in cuts if tail for letter in letters),
        *(head + letter + tail for head, tail in cuts for letter in letters),
    } - {word}


@pytest.mark.parametrize("key", TieringConfig.option_names())
def test_any_letter_that_is_off_gets_a_suggestion(key: str) -> None:
    told = complaint(dict.fromkeys(typos(key), 1))
    for typo in typos(key):
        assert f"unknown option '{typo}'; did you mean '{key}'?" in told


@pytest.mark.parametrize("key", MEMORY.split(", "))
def test_any_letter_that_is_off_in_a_tier_gets_a_suggestion(key: str) -> None:
    entries: list[dict[str, str]] = [{"type": "memory", **dict.fromkeys(typos(key), "1s")}]
    if key in ("type", "backend", "url"):
        # Nothing else in the entry says what the backend is.
        entries = [{typo: "memory"} for typo in typos(key)]
    told = complaint({"slots": 8, "tiers": entries})
    for typo in typos(key):
        assert f".{typo}'; did you mean '{key}'?" in told


def test_no_secret_is_in_a_message_or_a_repr() -> None:
    for url in (
        "memory://user:hunter2@host/0",
        "memory://user:hun/ter2@host/0#x",
        "memory://:hunter2@host:port/",
        "memory://user:hunter2@[host/",
        "memory:?password=hunter2&capcity=1",
        "memory:?pasword=hunter2#x",
        "nobody://user:hunter2@host",
        "my_tier://user:hunter2@host",
    ):
        for entry in (url, {"type": "memory", "url": url}):
            told = complaint({"slots": 8, "tiers": [entry]})
            assert "hun" not in told, told
            assert "ter2" not in told, told
    told = complaint({"slots": 8, "namespace": {"api_token": "hunter2", "x": {1}}, "policy": ["y"]})
    assert "hunter2" not in told
    config = TieringConfig.from_dict({"slots": 8, "namespace": {"api_token": "hunter2"}})
    assert "hunter2" not in repr(config)
    assert config.to_dict()["namespace"] == {"api_token": "***"}
    assert config.to_dict(secrets=True)["namespace"] == {"api_token": "hunter2"}


def test_a_pool_is_as_big_as_configured() -> None:
    with open_pool(TieringConfig.from_dict({"slots": 3}), chunk_bytes=100) as pool:
        assert (pool.slots, pool.chunk_bytes) == (3, 100)
    rows = TieringConfig.from_dict({"pool_bytes": "20KB", "chunk_bytes": "5000"})
    with open_pool(rows) as pool:
        assert (pool.slots, pool.chunk_bytes) == (2, 5000), "a row is 8,192 bytes"


def test_a_share_is_one_of_the_memory() -> None:
    config = TieringConfig.from_dict({"pool_bytes": "0.1%", "chunk_bytes": "1MiB"})
    with open_pool(config) as pool:
        assert pool.slots == total_memory_bytes() // 1000 // 2**20


@pytest.mark.parametrize(
    ("options", "chunk_bytes", "message"),
    [
        ({"slots": 3}, None, "option 'chunk_bytes' is missing"),
        ({"slots": 3, "chunk_bytes": 64}, 65, "option 'chunk_bytes' is 64, but the engine's chu"),
        ({"pool_bytes": 4095}, 64, "option 'pool_bytes' is 3.999 KiB, less than one slot of 4 KiB"),
        ({"slots": 10**9}, 2**20, "use fewer slots"),
    ],
)
def test_a_pool_that_cannot_be_made_says_why(
    options: dict[str, Any], chunk_bytes: int | None, message: str
) -> None:
    config = TieringConfig.from_dict(options)
    with pytest.raises(ConfigError, match=message), open_pool(config, chunk_bytes=chunk_bytes):
        raise AssertionError("there is no such pool")


def memory_of(root: Path, group: str | None, limits: Mapping[str, str]) -> int:
    proc, groups = root / "proc", root / "cgroup"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemFree: 1 kB\nMemTotal:    8 kB\n")
    if group is not None:
        (proc / "self" / "cgroup").write_text(f"0::/{group}\n")
    for directory, text in limits.items():
        (groups / directory).mkdir(parents=True, exist_ok=True)
        (groups / directory / "memory.max").write_text(text)
        (groups / directory / "memory.current").write_text("100\n")
    return total_memory_bytes(proc, groups)


@pytest.mark.parametrize(
    ("group", "limits", "size_bytes"),
    [
        (None, {}, 8192),
        ("a/b", {}, 8192),
        ("a/b", {"a/b": "max\n"}, 8192),
        ("a/b", {"a/b": "4096\n"}, 4096),
        ("a/b", {"a": "4096\n", "a/b": "max\n"}, 4096),
        ("a/b", {"a": "4096\n", "a/b": "512\n"}, 512),
        ("a/b", {"a/b": "9000\n"}, 8192),
        ("", {".": "4096\n"}, 4096),
    ],
)
def test_memory_is_what_the_container_may_take(
    tmp_path: Path, group: str | None, limits: Mapping[str, str], size_bytes: int
) -> None:
    assert memory_of(tmp_path, group, limits) == size_bytes


def test_facts_are_added_to_the_engines() -> None:
    config = TieringConfig.from_dict({"slots": 3, "namespace": {"model": "m", "tag": "x"}})
    bound = config.bind(Namespace({"model": "m", "dtype": "bfloat16"}))
    assert bound == Namespace({"model": "m", "dtype": "bfloat16", "tag": "x"})
    with pytest.raises(
        ConfigError, match="'namespace.model' is 'm', but the engine says 'other'; leave it out"
    ):
        config.bind(Namespace({"model": "other"}))


def test_a_manager_is_made_as_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timeouts = []
    real = TieringManager.shutdown

    def noting(manager: TieringManager, timeout_s: float) -> None:
        timeouts.append(timeout_s)
        real(manager, timeout_s)

    monkeypatch.setattr(TieringManager, "shutdown", noting)
    options = {
        "slots": 40,
        "chunk_bytes": 64,
        "store_reserve": "25%",
        "policy": "arc",
        "recompute": "5ms",
        "shutdown_timeout": "7s",
        "namespace": {"tag": "configured"},
        "tiers": [f"file://{tmp_path}/kv", {"type": "memory", "store_policy": "on_evict"}],
    }
    config = TieringConfig.from_dict(options)
    with open_pool(config) as pool, open_manager(pool, config, Namespace({"x": 1})) as manager:
        assert [stats.name for stats in manager.stats[1:]] == ["file", "memory"]
        assert manager.headroom_slots == 10
        assert manager._recompute_s == 0.005
        assert type(manager._policy).__name__ == "ARCPolicy"
    assert timeouts == [7.0]
    (manifest,) = (tmp_path / "kv").rglob("manifest.json")
    facts = json.loads(manifest.read_text())["facts"]
    assert (facts["tag"], facts["x"]) == ("configured", 1)


def test_a_manager_refuses_a_pool_of_other_chunks() -> None:
    config = TieringConfig.from_dict({"slots": 3, "chunk_bytes": 64})
    pool = HostPool(3, 128)
    with (
        pytest.raises(ConfigError, match="option 'chunk_bytes' is 64"),
        open_manager(pool, config, Namespace({})),
    ):
        raise AssertionError("there is no such manager")
    pool.close()


def test_only_tiers_are_a_configuration_too() -> None:
    pool = HostPool(3, 128)
    with open_manager(pool, ["memory:"], Namespace({})) as manager:
        assert [stats.name for stats in manager.stats[1:]] == ["memory"]
    with (
        pytest.raises(ConfigError, match="option 'tiers.1..name': two tiers are named 'memory'"),
        open_manager(pool, ["memory:", "memory:"], Namespace({})),
    ):
        raise AssertionError("there is no such manager")
    pool.close()
