from types import SimpleNamespace
from typing import Any

import pytest

from kvtier_sdk import ConfigError, TieringConfig
from kvtier_vllm.options import EXTRA_CONFIG, SecondaryTierEntry, SpecOptions
from kvtier_vllm.transfer_config import read_transfer_config

ENTRY = {"type": "kvtier", "url": "memory:?capacity=1GiB"}


def guest(entries: list[dict[str, Any]], index: int = 0) -> SecondaryTierEntry:
    own = {"type", "module_path", "backpressure"}
    options = {key: value for key, value in entries[index].items() if key not in own}
    spec = SimpleNamespace(extra_config={"secondary_tiers": entries})
    return SecondaryTierEntry.of_tier(spec, options)


def host(**options: Any) -> SpecOptions:
    given = {"spec_name": "KVTierOffloadingSpec", **options}
    return SpecOptions.from_dict(given, where=EXTRA_CONFIG.where)


def under_vllms_manager(cpu_bytes_to_use: object) -> TieringConfig:
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": cpu_bytes_to_use,
        "secondary_tiers": [ENTRY],
    }
    options = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    return read_transfer_config({**options, "kv_connector_extra_config": extra}, where="kv.json")


def test_an_entry_by_url_and_one_by_flat_options_are_the_same() -> None:
    flat = {"type": "kvtier", "backend": "memory", "capacity": "1GiB"}
    assert guest([flat]).tier == guest([ENTRY]).tier
    by_class = {**flat, "type": "KVTierSecondaryTier", "module_path": "kvtier_vllm"}
    assert guest([by_class]).tier == guest([ENTRY]).tier


def test_what_is_ours_beside_the_tiers_options() -> None:
    entry = {**ENTRY, "verify": "no", "model_revision": "v2", "backpressure": {}}
    options = guest([entry]).options
    assert not options.verify
    assert options.model_revision == "v2"


@pytest.mark.parametrize(
    ("entries", "index", "complaint"),
    [
        ([{"type": "kvtier"}], 0, "secondary_tiers[0]"),
        ([{**ENTRY, "capasity": 1}], 0, "'secondary_tiers[0].capasity'; did you mean 'capacity'?"),
        ([{"type": "fs"}, {**ENTRY, "verify": "perhaps"}], 1, "'secondary_tiers[1].verify'"),
        ([ENTRY, {**ENTRY, "retries": 1}], 1, "'secondary_tiers[1].name': two tiers are named"),
    ],
)
def test_a_wrong_entry_is_told(entries: list[dict[str, Any]], index: int, complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        guest(entries, index)
    assert complaint in str(error.value)
    assert str(error.value).startswith("kv_connector_extra_config: ")


def test_all_entries_of_ours_are_read_by_where_they_stand() -> None:
    entries = [{"type": "fs"}, ENTRY, {**ENTRY, "name": "second", "backpressure": {}}]
    read = SecondaryTierEntry.read_all(entries)
    assert {place.path: entry.tier.name for place, entry in read.items()} == {
        "secondary_tiers[1]": "memory",
        "secondary_tiers[2]": "second",
    }
    assert guest(entries, 2) == read[EXTRA_CONFIG.at("secondary_tiers", 2)]
    assert SecondaryTierEntry.read_all([{"type": "fs"}]) == {}


def test_an_entry_is_not_taken_for_one_that_says_more() -> None:
    entries = [{**ENTRY, "name": "first"}, ENTRY]
    assert [guest(entries, index).tier.name for index in (0, 1)] == ["first", "memory"]


def test_vllms_names_and_ours_make_one_configuration() -> None:
    options = host(
        cpu_bytes_to_use="4GiB",
        eviction_policy="arc",
        secondary_tiers=["memory:", {"type": "kvtier", "url": "memory:?name=second"}],
        store_reserve="20%",
        offload_prompt_only=False,
        copies="kvtier",
    )
    assert options.config.pool_bytes == 4 * 2**30
    assert options.config.policy == "arc"
    assert options.config.store_reserve == 0.2
    assert [tier.name for tier in options.config.tiers] == ["memory", "second"]
    assert options.copies == "kvtier"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({}, "option 'cpu_bytes_to_use' is missing"),
        ({"cpu_bytes": 1}, "unknown option 'cpu_bytes'; did you mean 'cpu_bytes_to_use'?"),
        ({"pool_bytes": 1}, "unknown option 'pool_bytes'"),
        ({"cpu_bytes_to_use": "much"}, "option 'cpu_bytes_to_use'"),
        ({"cpu_bytes_to_use": 1, "eviction_policy": "mru"}, "option 'eviction_policy': "),
        (
            {"cpu_bytes_to_use": 1, "secondary_tiers": ["memory:?capasity=1"]},
            "unknown option 'secondary_tiers[0].capasity'; did you mean 'capacity'?",
        ),
        ({"cpu_bytes_to_use": 1, "secondary_tiers": {}}, "option 'secondary_tiers' should be"),
        ({"cpu_bytes_to_use": 1, "copies": "cuda"}, "option 'copies' is 'cuda'"),
    ],
)
def test_a_wrong_option_is_told_in_vllms_words(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ConfigError) as error:
        host(**options)
    assert complaint in str(error.value)
    assert str(error.value).startswith("kv_connector_extra_config: ")


@pytest.mark.parametrize("size", [4 << 30, str(4 << 30), "4_294_967_296", float(4 << 30)])
def test_the_size_of_vllms_own_pool_is_what_vllm_makes_of_it(size: object) -> None:
    assert under_vllms_manager(size).pool_bytes == int(size)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("size", "write"),
    [
        ("4GiB", "write 4294967296"),
        ("1.5 KB", "write 1500"),
        ("50%", "write for example 4294967296"),
        ("0GiB", "write for example 4294967296"),
        (0.5, "write for example 4294967296"),
        (0, "write for example 4294967296"),
        (-1, "write for example 4294967296"),
        (float("inf"), "write for example 4294967296"),
        ([], "write for example 4294967296"),
    ],
)
def test_a_size_that_vllm_cannot_read_is_refused_with_advice(size: object, write: str) -> None:
    with pytest.raises(ConfigError) as error:
        under_vllms_manager(size)
    assert str(error.value) == (
        f"kv.json: kv_connector_extra_config: option 'cpu_bytes_to_use' is {size!r}, and vLLM "
        f"takes bytes only; {write}"
    )
