from __future__ import annotations

import hashlib
import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvtier_sdk import Namespace, StoredNamespace
from kvtier_sdk.chunk_header import HEADER_VERSION

SCALARS = st.none() | st.booleans() | st.integers(0, 3) | st.just(1.0) | st.sampled_from("ab")
FACTS = st.dictionaries(st.sampled_from("xyz"), SCALARS | st.lists(SCALARS, max_size=2))


def test_the_fingerprint_is_fixed_across_releases() -> None:
    assert HEADER_VERSION == 2
    facts = {"model": "m", "groups": 2}
    # SHA-256 of {"frame_version":2,"groups":2,"model":"m"}, cut to 128 bits.
    assert Namespace(facts).fingerprint == "3fe54d25b8d81099f1ff47a20ce25344"


@given(FACTS, FACTS)
@example({"x": 1}, {"x": 1.0})
@example({"x": 1}, {"x": True})
def test_namespaces_are_equal_as_their_fingerprints_are(
    ours: dict[str, object], theirs: dict[str, object]
) -> None:
    one, other = Namespace(ours), Namespace(theirs)
    assert (one == other) is (one.fingerprint == other.fingerprint)
    if one == other:
        assert hash(one) == hash(other)


@given(FACTS, FACTS)
@example({"x": None}, {})
@example({"x": 1}, {"x": True})
def test_there_is_a_difference_exactly_where_the_fingerprints_differ(
    ours: dict[str, object], theirs: dict[str, object]
) -> None:
    one, other = Namespace(ours), Namespace(theirs)
    read_back = json.loads(other.manifest_json())["facts"]
    assert bool(one.differences(read_back)) is (one.fingerprint != other.fingerprint)


def test_a_difference_names_ours_and_theirs() -> None:
    ours = Namespace({"model": "m", "dtype": "bf16", "only": 1, "layers": (1, 2)})
    theirs = {"model": "m", "dtype": "fp8", "extra": 2, "layers": [1, 2]}
    assert ours.differences({**theirs, "frame_version": HEADER_VERSION}) == {
        "dtype": ("bf16", "fp8"),
        "extra": (None, 2),
        "only": (1, None),
    }


def test_a_secret_decides_but_is_in_no_manifest() -> None:
    ours, theirs = Namespace({"api_token": "hunter2"}), Namespace({"api_token": "hunter3"})
    assert ours != theirs
    for text in (ours.manifest_json(), str(ours.manifest), str(ours.differences(theirs.manifest))):
        assert "hunter2" not in text
    assert ours.manifest["api_token"] == "***"
    nested = Namespace({"store": {"password": "hunter2", "url": "s3://u:hunter2@h"}})
    assert "hunter2" not in nested.manifest_json()


def test_a_manifest_that_was_read_back_keeps_its_fingerprint() -> None:
    ours = Namespace({"model": "llama", "layers": (1, 2)})
    found = StoredNamespace.read(ours.fingerprint, ours.manifest_json().encode())
    assert found == ours
    assert found.facts == {"model": "llama", "layers": [1, 2], "frame_version": HEADER_VERSION}
    assert found.for_chunks(4096) == found.adding(codec="aes-gcm") == ours
    assert found.fault == ""


def nested(levels: int) -> bytes:
    return b'{"facts": {"model": %b}}' % (b"[" * levels + b"]" * levels)


@pytest.mark.parametrize(
    ("manifest", "fault"),
    [
        (None, "no manifest"),
        *(
            (text, "unreadable manifest")
            for text in (b"", b"{", b"[]", b'{"facts": 3}', b"\xff", b"[" * 100_000, nested(900))
        ),
        (b'{"facts": {"n": %b}}' % (b"9" * 5000), "unreadable manifest"),
        (b'{"facts": {"model": "\\udc80"}}', "unverified manifest"),
        (Namespace({"model": "another"}).manifest_json().encode(), "unverified manifest"),
        (Namespace({"api_token": "hidden"}).manifest_json().encode(), "unverified manifest"),
    ],
)
def test_a_manifest_that_does_not_give_the_fingerprint_has_no_facts(
    manifest: bytes | None, fault: str
) -> None:
    found = StoredNamespace.read(Namespace({"api_token": "hidden"}).fingerprint, manifest)
    assert (found.fault, found.facts) == (fault, {})


def test_facts_that_are_nested_too_deeply_are_not_read_although_they_give_the_fingerprint() -> None:
    facts = json.loads(nested(900))["facts"]
    digits = hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).hexdigest()[:32]
    assert StoredNamespace.read(digits, nested(900)).fault == "unreadable manifest"


@pytest.mark.parametrize(
    ("text", "is_one"), [("ab" * 16, True), ("AB" * 16, False), ("ab" * 15, False), ("", False)]
)
def test_a_fingerprint_is_told_from_other_names(text: str, is_one: bool) -> None:
    assert StoredNamespace.is_fingerprint(text) is is_one
