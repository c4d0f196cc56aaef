"""An error message shows the path of an option, and suggests a similar name."""

from __future__ import annotations

import pytest

from kvtier_sdk import ConfigError
from kvtier_sdk.options.place import Place, nearest


def test_a_place_begins_a_complaint() -> None:
    root = Place("kv.toml")
    assert str(root) == "kv.toml:"
    assert str(root.at("tiers", 1, "capacity")) == "kv.toml: option 'tiers[1].capacity'"
    assert root.at("tiers", 1).at("name") == Place("kv.toml", "tiers[1].name")
    assert root.at() == root


def test_only_a_table_with_names_is_a_table() -> None:
    place = Place("kv.toml", "namespace")
    given = {"a": 1}
    assert place.table(given) == given
    assert place.table(given) is not given
    for value, said in (
        (["a"], "kv.toml: option 'namespace' should be a table of options"),
        (None, "should be a table of options"),
        (b"a", "should be a table of options"),
        ({1: 2}, "kv.toml: option 'namespace.1' has a name that is not text"),
    ):
        with pytest.raises(ConfigError) as caught:
            place.table(value)
        assert said in str(caught.value)


def test_the_entries_of_a_list_have_places() -> None:
    place = Place("kv.toml", "tiers")
    assert place.entries(["x", 2]) == {place.at(0): "x", place.at(1): 2}
    with pytest.raises(ConfigError, match="option 'tiers' should be a list"):
        place.entries("x")


def test_nearest_lists_what_is_known() -> None:
    assert nearest("rdis", ["s3", "redis"], "installed") == (
        "did you mean 'redis'? installed: redis, s3"
    )
    assert nearest("zzz", ["s3"], "installed") == "installed: s3"
    assert nearest("zzz", [], "installed") == "installed: none"
