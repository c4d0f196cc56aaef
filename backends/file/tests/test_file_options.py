import os

import pytest

from kvtier_sdk import ConfigError, KVTierError, TierSpec


def config(url: str, **options: object):
    return TierSpec.from_url(url, **options).config


def test_all_options_in_a_url(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = config("file:rel/a%20b?capacity=1GiB&min_free=10GiB&direct_io=off&fsync=yes")
    assert options.root == tmp_path / "rel" / "a b"
    assert (options.capacity_bytes, options.min_free) == (2**30, 10 * 2**30)
    assert (options.direct_io, options.fsync) == ("off", True)
    assert config("file:?root=/x").root.as_posix() == "/x"


@pytest.mark.parametrize(
    ("given", "expected"),
    [(True, "on"), ("true", "on"), ("ON", "on"), (False, "off"), ("0", "off"), ("auto", "auto")],
)
def test_direct_io_spellings(given, expected):
    assert config("file:///x", direct_io=given).direct_io == expected


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("file://data/kv", r"three slashes: 'file:///data/kv'"),
        ("file://data", r"three slashes: 'file:///data'"),
        ("file://me@/kv", r"three slashes"),
        ("file:", r"option 'root' is missing"),
        ("file:?root=", r"is not a path"),
        ("file:///a%00b", r"is not a path"),
        ("file:///x?root=/y", r"option 'root' is given in the URL twice"),
        ("file:///x?min_free=101%25", r"outside 0% to 100%"),
        ("file:///x?direct_io=maybe", r"not one of auto, on, off"),
    ],
)
def test_error_messages(url, complaint):
    with pytest.raises(ConfigError, match=complaint):
        config(url)


async def test_a_capacity_below_one_chunk_is_refused_before_anything_is_made(bench):
    tier = bench.make(capacity=bench.object_bytes - 1)
    with pytest.raises(ConfigError, match=r"capacity 104 KiB is below one chunk .*\(104 KiB\)"):
        await tier.open()
    assert not bench.root.exists()
    await tier.close()


async def test_a_root_below_a_file(bench, tmp_path):
    bench.root = tmp_path / "file" / "kv"
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="kv' is not writable: Not a directory; choose another"):
        await bench.open()


async def test_the_error_of_a_root_that_cannot_be_opened_is_kept(bench):
    # This link is like a broken mount point: it exists, but stat fails.
    bench.root.symlink_to(bench.root)
    with pytest.raises(KVTierError, match="Too many levels of symbolic links"):
        await bench.open()


async def test_the_root_may_be_a_link_the_namespace_may_not(bench, tmp_path):
    (tmp_path / "disk").mkdir()
    bench.root.symlink_to(tmp_path / "disk")
    tier = await bench.open()
    assert await bench.put(tier, b"key") == [None]
    assert (tmp_path / "disk" / bench.namespace.fingerprint).is_dir()
    await bench.close()
    bench.directory.rename(tmp_path / "moved")
    bench.directory.symlink_to(tmp_path / "moved")
    with pytest.raises(ConfigError, match="is not writable"):
        await bench.open()


async def test_an_existing_root_keeps_its_mode(bench):
    bench.root.mkdir(mode=0o750)
    os.chmod(bench.root, 0o750)
    await bench.open()
    assert bench.root.stat().st_mode & 0o7777 == 0o750
