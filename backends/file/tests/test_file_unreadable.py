import errno
import os
from unittest.mock import ANY

import pytest

from kvtier_sdk import ChunkError, Usage

KEYS = [index.to_bytes(20, "big") for index in range(6)]


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES, errno.EBADMSG])
async def test_a_file_that_cannot_be_opened_fails_alone(bench, spoil, code):
    tier = await bench.open()
    await bench.put(tier, *KEYS[:3])
    spoil("open", code, KEYS[1])
    first, bad, last = await tier.load([bench.empty(key) for key in KEYS[:3]])
    assert first is last is None
    assert type(bad) is ChunkError
    assert str(bench.root) in str(bad)
    assert os.strerror(code) in str(bad)
    assert not bad.retryable


async def test_a_file_that_cannot_be_examined_is_a_miss_among_others_that_can(bench, spoil):
    tier = await bench.open()
    await bench.put(tier, *KEYS[:3])
    spoil("stat", errno.EIO, KEYS[1])
    assert await bench.has(tier, *KEYS[:3]) == [True, False, True]
    with pytest.raises(ChunkError):
        await bench.has(tier, KEYS[1])


async def test_a_file_that_cannot_be_removed_ends_no_lookup(bench, spoil):
    tier = await bench.open()
    await bench.put(tier, *KEYS[:2])
    os.truncate(bench.file(KEYS[0]), 10)
    spoil("unlink", errno.EPERM, KEYS[0])
    assert await bench.has(tier, *KEYS[:2]) == [False, True]


async def test_a_file_that_cannot_be_touched_is_written_over(bench, spoil):
    tier = await bench.open()
    await bench.put(tier, *KEYS[:3])
    spoil("utime", errno.EPERM, KEYS[0])
    await tier.touch(KEYS[:3])
    assert await tier.store([bench.full(key, 1) for key in KEYS[:2]]) == [None, None]
    batch = [bench.empty(key) for key in KEYS[:2]]
    assert await tier.load(batch) == [None, None]
    assert [bench.holds(batch[0], 1), bench.holds(batch[1], 0)] == [True, True]
    assert await tier.usage() == Usage(3, 3 * bench.object_bytes, None, ANY)


async def test_a_file_that_cannot_be_replaced_fails_alone_and_leaves_nothing(bench, spoil):
    tier = await bench.open()
    await bench.put(tier, *KEYS[:2])
    spoil("rename", errno.EPERM, KEYS[0])
    batch = [bench.full(key, 1, replace=True) for key in KEYS[:2]]
    bad, good = await tier.store(batch)
    assert type(bad) is ChunkError
    assert good is None
    assert bench.temporaries() == []
    assert await tier.usage() == Usage(2, 2 * bench.object_bytes, None, ANY)
    assert await bench.loads(tier, KEYS[0])
