from hypothesis import given
from hypothesis import strategies as st

from kvtier_sdk import Namespace, ObjectNames

OURS = ObjectNames("kv/here", Namespace({"model": "ours"}))
THEIRS = ObjectNames("kv/here", Namespace({"model": "theirs"}))


@given(st.binary())
def test_a_name_leads_back_to_its_key(key):
    name = OURS.of(key)
    assert OURS.key_in(name) == key
    assert OURS.is_chunk(name)
    assert name.startswith(OURS.start)
    assert OURS.start.startswith(OURS.root)


@given(st.binary())
def test_another_namespace_s_chunk_is_a_chunk_but_has_no_key_here(key):
    assert OURS.key_in(THEIRS.of(key)) is None
    assert OURS.is_chunk(THEIRS.of(key))


def test_a_foreign_object_is_no_chunk():
    name = OURS.of(b"key")
    shard = name.split("/")[-2]
    wrong_shard = name.replace(f"/{shard}/", f"/{int(shard, 16) ^ 1:02x}/")
    for foreign in (
        "",
        name + "x",
        name.upper(),
        "x" + name,
        name.replace("6b", "6b "),
        wrong_shard,
    ):
        assert OURS.key_in(foreign) is None
    assert not OURS.is_chunk(OURS.manifest)
    assert not OURS.is_chunk(f"{OURS.root}sweepers/0.kv")


def test_without_a_prefix_names_begin_with_the_fingerprint():
    bare = ObjectNames("", Namespace({"model": "ours"}))
    assert bare.root == ""
    assert bare.manifest == bare.manifest_of(Namespace({"model": "ours"}).fingerprint)
    assert bare.of(b"key") == OURS.of(b"key").removeprefix("kv/here/")
