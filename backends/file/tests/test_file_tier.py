import asyncio
import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from unittest.mock import ANY

import pytest
from support.copies import ByteLedger, check_no_copies

from kvtier_sdk import (
    ChunkNotFoundError,
    CorruptChunkError,
    TierAuthError,
    TierCapacityError,
    TierError,
    TierUnavailableError,
    Usage,
)
from kvtier_sdk.chunk_header import ChunkHeader

KEYS = [index.to_bytes(20, "big") for index in range(20)]


def failing(call: Callable[..., int], code: int, *, times: int = 10**9) -> Callable[..., int]:
    """Wrap ``call`` so that its first ``times`` calls raise an error."""
    left = iter(range(times))

    def wrapped(*args: object, **kwargs: object) -> int:
        if next(left, None) is not None:
            raise OSError(code, os.strerror(code))
        return call(*args, **kwargs)

    return wrapped


async def test_fsync_syncs_data_and_names(bench, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    tier = await bench.open(fsync="true")
    synced.clear()
    assert await bench.put(tier, KEYS[0]) == [None]
    shard = bench.file(KEYS[0]).parent
    # The new shard's name is synced first, then the temporary file's data, then the chunk's name.
    assert synced[0] == str(bench.directory)
    assert "/tmp/" in synced[1]
    assert synced[2] == str(shard)


@pytest.mark.parametrize("size_bytes", [0, 4096, 8191, 26 * 4096 - 1, 26 * 4096 + 1, 27 * 4096])
async def test_a_file_of_no_chunks_length_is_corrupt_and_then_gone(
    bench, in_both_forms, size_bytes
):
    tier = await bench.open()
    await bench.put(tier, KEYS[0])
    os.truncate(bench.file(KEYS[0]), size_bytes)
    target = bench.empty(KEYS[0])
    (verdict,) = await tier.load([target])
    assert isinstance(verdict, CorruptChunkError)
    assert f"{size_bytes} bytes stored" in str(verdict)
    assert not any(target.payload)
    assert await bench.has(tier, KEYS[0]) == [False]
    assert list(bench.directory.glob("*/*.kv")) == []
    assert bench.removed == [KEYS[0]]
    assert (await tier.usage()).used_bytes == 0
    assert await bench.put(tier, KEYS[0]) == [None]
    assert await bench.loads(tier, KEYS[0])


@pytest.mark.parametrize("direct_io", ["off", "auto"])
async def test_chunks_of_any_number_of_pages(bench, in_both_forms, direct_io):
    tier = await bench.open(direct_io=direct_io)
    stores = [bench.pages(key, count) for key, count in zip(KEYS, (1, 24, 25), strict=False)]
    keys, lengths = KEYS[:3], [2 * 4096, 25 * 4096, 26 * 4096]
    assert await tier.store(stores) == [None] * 3
    for _ in range(2):
        loads = [bench.empty(key) for key in keys]
        assert await tier.load(loads) == [None] * 3
        for store, load in zip(stores, loads, strict=True):
            assert (load.header, load.arrived) == store.buffers
            assert not any(load.payload[len(store.payload) :])
        assert await bench.has(tier, *keys) == [True] * 3
        found = {entry.key: entry.object_bytes async for entry in tier.scan()}
        assert found == dict(zip(keys, lengths, strict=True))
        assert await tier.usage() == Usage(3, sum(lengths), None, ANY)
        assert bench.header().reserved_bytes == 0
        used_ns = [bench.file(key).stat().st_mtime_ns for key in keys]
        await tier.touch(keys)
        assert all(bench.file(key).stat().st_mtime_ns > used_ns.pop(0) for key in keys)
        await bench.close()
        tier = await bench.open(direct_io=direct_io)


async def test_a_file_cut_or_extended_by_whole_pages_does_not_match_its_header(
    bench, in_both_forms
):
    tier = await bench.open()
    header = ChunkHeader("f" * 64, bench.chunk_bytes, 4096)
    for count, damaged in ((25, 24), (2, 1), (2, 3)):
        stored = bench.pages(KEYS[0], count, replace=True)
        stored.unsealed = header.seal
        assert await tier.store([stored]) == [None]
        for size_bytes, is_whole in (((1 + count) * 4096, True), ((1 + damaged) * 4096, False)):
            os.truncate(bench.file(KEYS[0]), size_bytes)
            target = bench.empty(KEYS[0])
            target.unverified = header.check
            (verdict,) = await tier.load([target])
            assert (verdict is None) is is_whole
            assert is_whole or isinstance(verdict, CorruptChunkError)


async def test_truncated_while_it_is_read(bench, monkeypatch):
    tier = await bench.open(direct_io="off")
    await bench.put(tier, KEYS[0])
    real = os.preadv

    def truncating(fd, buffers, offset):
        os.truncate(bench.file(KEYS[0]), 5000)
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", truncating)
    (verdict,) = await tier.load([bench.empty(KEYS[0])])
    assert isinstance(verdict, CorruptChunkError)


async def test_a_link_in_a_chunks_place_is_not_followed(bench, tmp_path):
    tier = await bench.open()
    await bench.put(tier, KEYS[0])
    file = bench.file(KEYS[0])
    secret = tmp_path / "secret"
    file.rename(secret)
    before = secret.read_bytes()
    file.symlink_to(secret)
    target = bench.empty(KEYS[0])
    (verdict,) = await tier.load([target])
    assert isinstance(verdict, CorruptChunkError)
    assert not any(target.payload)
    assert await bench.has(tier, KEYS[0]) == [False]
    secret.write_bytes(b"precious")
    file.unlink(missing_ok=True)
    file.symlink_to(secret)
    assert await bench.put(tier, KEYS[0]) == [None]
    assert not file.is_symlink()
    assert file.read_bytes() == before
    assert secret.read_bytes() == b"precious"


async def test_a_shard_that_is_a_link_is_not_followed(bench, tmp_path):
    tier = await bench.open()
    await bench.put(tier, KEYS[0])
    shard = bench.file(KEYS[0]).parent
    shard.rename(tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    assert await bench.has(tier, KEYS[0]) == [False]
    (verdict,) = await tier.load([bench.empty(KEYS[0])])
    assert isinstance(verdict, CorruptChunkError)
    (verdict,) = await bench.put(tier, KEYS[0])
    assert isinstance(verdict, TierError)
    await tier.delete([KEYS[0]])
    assert len(list((tmp_path / "elsewhere").iterdir())) == 1


@pytest.mark.parametrize("make", [Path.mkdir, os.mkfifo])
async def test_a_directory_or_pipe_in_a_chunks_place(bench, make):
    tier = await bench.open()
    await bench.put(tier, *KEYS[:2])
    file = bench.file(KEYS[0])
    file.unlink()
    make(file)
    verdicts = await tier.load([bench.empty(key) for key in KEYS[:2]])
    assert isinstance(verdicts[0], CorruptChunkError)
    assert verdicts[1] is None
    assert await bench.has(tier, *KEYS[:2]) == [False, True]
    await tier.delete([KEYS[0]])
    assert file.is_dir() == (make is Path.mkdir)


async def test_a_key_too_long_for_a_name(bench):
    tier = await bench.open()
    longest, longer = bytes(126), bytes(127)
    first, second = await bench.put(tier, longest, longer)
    assert first is None
    assert isinstance(second, TierError)
    assert "too long" in str(second)
    assert await bench.has(tier, longest, longer) == [True, False]
    await tier.delete([longer])
    await tier.touch([longer])
    assert bench.temporaries() == []


@pytest.mark.parametrize("direct_io", ["off", "auto"])
async def test_short_writes_and_reads_are_continued(bench, monkeypatch, direct_io):
    def short(move):
        # The remainder after 5,000 bytes is not aligned.
        return lambda fd, buffers, offset: move(fd, [buffers[0][:5000]], offset)

    tier = await bench.open(direct_io=direct_io)
    monkeypatch.setattr(os, "pwritev", short(os.pwritev))
    monkeypatch.setattr(os, "preadv", short(os.preadv))
    assert await bench.put(tier, KEYS[0]) == [None]
    assert bench.file(KEYS[0]).read_bytes() == bench.content(KEYS[0])
    assert await bench.loads(tier, KEYS[0])


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        (errno.ENOSPC, TierCapacityError),
        (errno.EDQUOT, TierCapacityError),
        (errno.EIO, TierUnavailableError),
        (errno.ESTALE, TierUnavailableError),
        (errno.EROFS, TierAuthError),
        (errno.EINVAL, TierUnavailableError),
    ],
)
async def test_a_failed_write_fails_alone_and_leaves_nothing(bench, monkeypatch, code, expected):
    tier = await bench.open(direct_io="off")
    # When the disk is full, a store evicts and tries again, up to twice.
    times = 3 if expected is TierCapacityError else 1
    monkeypatch.setattr(os, "pwritev", failing(os.pwritev, code, times=times))
    first, second = await bench.put(tier, *KEYS[:2])
    assert type(first) is expected
    assert first.retryable == (expected is TierUnavailableError)
    assert str(bench.root) in str(first)
    assert second is None
    assert await bench.has(tier, *KEYS[:2]) == [False, True]
    assert await tier.usage() == Usage(1, bench.object_bytes, None, ANY)
    assert bench.temporaries() == []


async def test_a_full_file_system(small):
    tier = await small.open()
    verdicts = await small.put(tier, *KEYS)
    stored = [key for key, verdict in zip(KEYS, verdicts, strict=True) if verdict is None]
    assert 0 < len(stored) < len(KEYS)
    assert all(verdict is None or type(verdict) is TierCapacityError for verdict in verdicts)
    assert small.temporaries() == []
    assert small.stored_bytes() == len(stored) * small.object_bytes
    assert await small.loads(tier, *stored)
    # A tier opens on a full disk, and its chunks can be loaded.
    await small.close()
    assert await small.loads(await small.open(), *stored)


def fill_up(at: Path) -> None:
    with suppress(OSError), open(at / "log", "ab", buffering=0) as log:
        while log.write(bytes(4096)):
            pass


@pytest.fixture(params=["mounted", "on_disk"])
def crowded_at(request):
    return request.getfixturevalue(request.param)


@pytest.fixture
async def crowded(bench, crowded_at):
    bench.root, bench.chunk_bytes = crowded_at / "kv", 31 * 4096
    await bench.put(await bench.open(), *KEYS[:5])
    await bench.close()
    fill_up(crowded_at)
    bench.facts = {"model": "new"}
    return bench


async def test_a_new_namespace_on_a_full_file_system_makes_room_first(crowded):
    tier = await crowded.open(min_free="5%")
    assert (crowded.directory / "manifest.json").exists()
    assert await crowded.has(tier, KEYS[0]) == [False]
    assert await crowded.put(tier, *KEYS[5:7]) == [None] * 2
    assert await crowded.loads(tier, *KEYS[5:7])


@pytest.mark.parametrize("crowded_at", ["mounted"], indirect=True)
@pytest.mark.parametrize("options", [{"min_free": 0}, {"direct_io": "on"}])
async def test_a_store_that_is_refused_room_makes_it(crowded, options):
    tier = await crowded.open(**options)
    assert await crowded.put(tier, KEYS[5]) == [None]
    assert await crowded.loads(tier, KEYS[5])


@pytest.mark.parametrize("mounted", ["size=4m,nr_inodes=250"], indirect=True)
async def test_where_inodes_run_out_old_chunks_make_room(small):
    """The file system's byte counters still show free space."""
    small.chunk_bytes = 1
    tier = await small.open(min_free=0)
    keys = [index.to_bytes(20, "big") for index in range(200)]
    for start in range(0, 200, 10):
        assert await small.put(tier, *keys[start : start + 10]) == [None] * 10
    assert small.removed
    assert await small.loads(tier, *keys[-5:])


async def test_a_new_namespace_opens_where_no_room_can_be_made(crowded):
    tier = await crowded.open(min_free="1MiB")
    with suppress(TierCapacityError):  # raised if there is no room even for directories
        (verdict,) = await crowded.put(tier, KEYS[5])
        assert type(verdict) is TierCapacityError
    assert not (crowded.directory / "manifest.json").exists()
    os.truncate(crowded.root.parent / "log", 0)
    assert await crowded.put(tier, KEYS[5]) == [None]
    assert await crowded.loads(tier, KEYS[5])
    assert (crowded.directory / "manifest.json").exists()


async def test_a_namespace_half_made_on_a_full_file_system_opens(bench, monkeypatch):
    old, new = bench.facts, {"model": "new"}
    await bench.put(await bench.open(), KEYS[0])
    await bench.close()
    bench.facts = new
    bench.directory.mkdir()  # without "tmp", for which there was no room
    monkeypatch.setattr(os, "mkdir", failing(os.mkdir, errno.ENOSPC))
    for facts, is_stored in ((old, True), (new, False)):
        bench.facts = facts
        assert await bench.has(await bench.open(), KEYS[0]) == [is_stored]
        await bench.close()


async def test_a_failed_read_is_no_miss(bench, monkeypatch):
    tier = await bench.open()
    await bench.put(tier, *KEYS[:2])
    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", failing(os.preadv, errno.EMFILE, times=1))
        first, second = await tier.load([bench.empty(key) for key in KEYS[:2]])
    assert type(first) is TierUnavailableError
    assert second is None
    real = os.stat

    def unwell(path, *args, **kwargs):
        if kwargs.get("dir_fd") is not None:
            raise OSError(errno.ENOMEM, "broken")
        return real(path, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", unwell)
        with pytest.raises(TierUnavailableError):
            await bench.has(tier, KEYS[0])


async def test_delete_continues_after_a_failure(bench, spoil, monkeypatch):
    tier = await bench.open()
    await bench.put(tier, *KEYS[:3])
    spoil("unlink", errno.EPERM, KEYS[0])
    with pytest.raises(TierAuthError, match="not writable"):
        await tier.delete(KEYS[:2])
    assert await bench.has(tier, *KEYS[:3]) == [True, False, True]
    assert bench.removed == [KEYS[1]]
    monkeypatch.undo()
    await tier.delete([*KEYS[:3], KEYS[9]])
    assert sorted(bench.removed) == sorted(KEYS[:3])
    assert await tier.usage() == Usage(0, 0, None, ANY)


async def test_scan_lists_loadable_chunks(bench):
    tier = await bench.open()
    await bench.put(tier, *KEYS)
    os.truncate(bench.file(KEYS[3]), 10)
    (bench.file(KEYS[0]).parent / "notes.txt").write_text("hello")
    (bench.file(KEYS[0]).parent / "ABCD.kv").write_bytes(bytes(bench.object_bytes))
    found = [entry async for entry in tier.scan()]
    expected = [(key, bench.object_bytes) for key in KEYS if key != KEYS[3]]
    assert sorted((entry.key, entry.object_bytes) for entry in found) == expected
    for entry in found:
        assert entry.used_s == bench.file(entry.key).stat().st_mtime_ns / 1e9


async def test_counted_up_keys_spread_over_the_shards(bench):
    bench.chunk_bytes = 1
    tier = await bench.open()
    await bench.put(tier, *(index.to_bytes(36, "little") for index in range(1024)))
    sizes = [len(os.listdir(shard)) for shard in bench.directory.glob("??")]
    assert len(sizes) > 240
    assert max(sizes) < 20


async def test_modes_of_files_and_directories(bench):
    tier = await bench.open()
    await bench.put(tier, *KEYS)
    modes = {path.stat().st_mode & 0o7777 for path in bench.root.rglob("*") if path.is_file()}
    assert modes == {0o600}
    directories = [bench.root, *(path for path in bench.root.rglob("*") if path.is_dir())]
    assert {path.stat().st_mode & 0o7777 for path in directories} == {0o700}


async def test_a_directory_removed_by_hand_is_made_again(bench):
    tier = await bench.open()
    await bench.put(tier, *KEYS[:2])
    bench.directory.rename(bench.root.parent / "away")
    assert await bench.has(tier, KEYS[0]) == [False]
    (verdict,) = await tier.load([bench.empty(KEYS[1])])
    assert isinstance(verdict, ChunkNotFoundError)
    assert sorted(bench.removed) == sorted(KEYS[:2])
    assert await bench.put(tier, KEYS[2]) == [None]
    assert await bench.loads(tier, KEYS[2])
    assert (bench.directory / "manifest.json").exists()
    assert await tier.usage() == Usage(1, bench.object_bytes, None, ANY)


@pytest.mark.parametrize("gone", [1, 3], ids=["the one to go next", "all"])
async def test_usage_finds_out_that_files_were_removed_by_hand(bench, gone):
    tier = await bench.open()
    for key in KEYS[:3]:
        await bench.put(tier, key)
    for key in KEYS[:gone]:
        bench.file(key).unlink()
    assert await tier.usage() == Usage(3 - gone, (3 - gone) * bench.object_bytes, None, ANY)
    assert sorted(bench.removed) == sorted(KEYS[:gone])


async def test_a_call_under_way_at_close_stays_in_its_root(bench, tmp_path, monkeypatch, make_gate):
    tier = await bench.open()
    await bench.put(tier, KEYS[0])
    gate = make_gate(os.fstat)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", gate)
        lookup = asyncio.create_task(bench.has(tier, *KEYS[:2]))
        await gate.reached()
    await tier.close()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    others = [os.open(elsewhere, os.O_RDONLY) for _ in range(16)]
    gate.leave.set()
    try:
        assert await lookup == [True, False]
        assert os.listdir(elsewhere) == []
    finally:
        for other in others:
            os.close(other)
    with pytest.raises(TierUnavailableError):
        await bench.has(tier, KEYS[0])


async def flags_of_writes(bench, tier, monkeypatch):
    seen = []
    real = os.pwritev

    def noting(fd, buffers, offset):
        seen.append(bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT))
        return real(fd, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwritev", noting)
        assert await bench.put(tier, KEYS[0]) == [None]
    assert await bench.loads(tier, KEYS[0])
    return seen


@pytest.mark.parametrize(("direct_io", "expected"), [("on", [True]), ("off", [False])])
async def test_direct_io_on_and_off(bench, monkeypatch, direct_io, expected):
    try:
        tier = await bench.open(direct_io=direct_io)
    except ValueError as error:
        pytest.skip(str(error))
    assert await flags_of_writes(bench, tier, monkeypatch) == expected


@pytest.fixture
def no_direct(monkeypatch):
    real = os.open

    def refusing(path, flags, *mode, **directory):
        fd = real(path, flags & ~os.O_DIRECT, *mode, **directory)
        if flags & os.O_DIRECT:
            # Open the file first, because Linux makes the file before it refuses the flag.
            os.close(fd)
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return fd

    monkeypatch.setattr(os, "open", refusing)


@pytest.mark.usefixtures("no_direct")
async def test_direct_io_auto_falls_back_and_logs_it(bench, monkeypatch, caplog):
    caplog.set_level("INFO")
    tier = await bench.open(direct_io="auto")
    (said,) = [record for record in caplog.records if "O_DIRECT" in record.message]
    assert said.levelname == "INFO"
    assert await flags_of_writes(bench, tier, monkeypatch) == [False]


@pytest.mark.usefixtures("no_direct")
async def test_direct_io_on_fails_without_support(bench):
    with pytest.raises(ValueError, match="does not support O_DIRECT: Invalid argument"):
        await bench.open(direct_io="on")
    assert bench.temporaries() == []


async def test_direct_io_falls_back_for_a_single_file(bench, monkeypatch):
    tier = await bench.open(direct_io="auto")

    def picky(move):
        def wrapped(fd, buffers, offset):
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "not this one")
            return move(fd, buffers, offset)

        return wrapped

    monkeypatch.setattr(os, "pwritev", picky(os.pwritev))
    monkeypatch.setattr(os, "preadv", picky(os.preadv))
    assert await bench.put(tier, KEYS[0]) == [None]
    assert await bench.loads(tier, KEYS[0])


@pytest.mark.parametrize("direct_io", ["off", "auto"])
@pytest.mark.parametrize("operation", ["store", "load"])
async def test_no_payload_is_copied(bench, monkeypatch, operation, direct_io):
    bench.chunk_bytes = 4 * 2**20
    ledger = ByteLedger(monkeypatch, "preadv", "pwritev")
    await check_no_copies(bench, await bench.open(direct_io=direct_io), ledger, operation)
