from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.gated_copies import filled, one_tensor

from kvtier_sdk import HostPool, KVTierError, PoolLayout
from kvtier_sdk.runner.jobs import Operation
from kvtier_sdk.worker import DeviceBlocks, KVGroup, KVTensor, OffloadWorker
from kvtier_sdk.worker.cpu import CPUDevice


@st.composite
def caches(draw: st.DrawFn) -> list[KVGroup]:
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        blocks = draw(st.integers(4, 12))
        tensors = []
        for _ in range(draw(st.integers(1, 3))):
            page = draw(st.sampled_from([1, 3, 16]))
            tensors.append(
                draw(
                    st.sampled_from(
                        [
                            lambda b=blocks, p=page: KVTensor(filled(b, p)),
                            lambda b=blocks, p=page: KVTensor(filled(2, b, p), 1),
                            lambda b=blocks, p=page: KVTensor(filled(b, 2, p).transpose(1, 2)),
                            lambda b=blocks, p=page: KVTensor(filled(b, 3, p)[:, 1]),
                            lambda b=blocks, p=page: KVTensor(filled(b, 2, p + 1)[:, :, :p]),
                            lambda b=blocks, p=page: KVTensor(
                                filled(b, 8 * p).view(torch.bfloat16).view(b, 2, -1)
                            ),
                        ]
                    )
                )()
            )
        groups.append(KVGroup(tensors, draw(st.integers(1, 4))))
    return groups


def page(kv: KVTensor, block: int) -> bytes:
    return kv.tensor.select(kv.block_dim, block).contiguous().view(torch.uint8).numpy().tobytes()


def pages(group: KVGroup, block: int) -> list[bytes]:
    return [page(kv, block) for kv in group.tensors]


@given(caches(), st.data())
def test_blocks_come_back_into_other_blocks(groups: list[KVGroup], data: st.DataObject) -> None:
    stored, sizes, slots_of = [], [], []
    free = data.draw(st.permutations(range(64)))
    for group in groups:
        blocks = group.tensors[0].blocks
        ids = data.draw(st.permutations(range(blocks)))
        ids = ids[: data.draw(st.integers(0, blocks))]
        chunks = -(-len(ids) // group.blocks_per_chunk)
        stored.append(ids)
        sizes.append(len(ids))
        slots_of.append(free[:chunks])
        free = free[chunks:]
    part_bytes = max(group.chunk_bytes for group in groups)
    region = np.full((64, part_bytes + 24), 0xA5, np.uint8)
    with OffloadWorker(groups, region[:, 8 : 8 + part_bytes]) as worker:
        everything = [block for ids in stored for block in ids]
        flat = [slot for slots in slots_of for slot in slots]
        worker.submit_store(1, DeviceBlocks(everything, sizes, [0] * len(groups)), flat)
        worker.wait([1])
        (result,) = worker.get_finished()
        assert result.success
        assert result.operation is Operation.STORE
        assert result.size_bytes == sum(
            len(ids) * group.chunk_bytes // group.blocks_per_chunk
            for group, ids in zip(groups, stored, strict=True)
        )
        # The bytes beside a row and the unused slots are unchanged.
        assert (region[:, :8] == 0xA5).all()
        assert (region[:, 8 + part_bytes :] == 0xA5).all()
        assert (region[free] == 0xA5).all()

        firsts, counts, targets, sources, untouched = [], [], [], [], []
        for group, ids, slots in zip(groups, stored, slots_of, strict=True):
            per_chunk = group.blocks_per_chunk
            first = data.draw(st.integers(0, max(0, len(ids) - 1)))
            count = data.draw(st.integers(0, len(ids) - first)) if ids else 0
            into = data.draw(st.permutations(range(group.tensors[0].blocks)))
            targets.append(into[:count])
            untouched.append({block: pages(group, block) for block in into[count:]})
            firsts.append(first)
            counts.append(count)
            end = -(-(first + count) // per_chunk)
            sources += slots[first // per_chunk : end] if count else []
        originals = [
            [pages(group, ids[first + n]) for n in range(count)]
            for group, ids, first, count in zip(groups, stored, firsts, counts, strict=True)
        ]
        flat_targets = np.array([block for into in targets for block in into], np.int32)
        worker.submit_load(2, DeviceBlocks(flat_targets, counts, firsts), sources)
        worker.wait([2])
        assert [found.success for found in worker.get_finished()] == [True]
    for group, into, original, others in zip(groups, targets, originals, untouched, strict=True):
        assert [pages(group, block) for block in into] == original
        assert {block: pages(group, block) for block in others} == others


def test_groups_may_share_a_tensor() -> None:
    kv = one_tensor()
    before = kv.tensor.clone()
    host = np.zeros((4, 64), np.uint8)
    with OffloadWorker([KVGroup([kv]), KVGroup([kv])], host) as worker:
        worker.submit_store(1, DeviceBlocks([1, 2, 3], [1, 2]), [0, 1, 2])
        worker.wait([1])
        worker.submit_load(2, DeviceBlocks([5, 6, 7], [1, 2]), [0, 1, 2])
        worker.wait([2])
    assert torch.equal(kv.tensor[5:8], before[1:4])


def test_a_worker_of_a_replicated_pool_loads_what_the_first_one_stored() -> None:
    pool = HostPool.create(PoolLayout(4, 64, workers=2, replicated=True))
    first, second = one_tensor(), one_tensor()
    with OffloadWorker([KVGroup([first])], pool.part(0)) as worker:
        worker.submit_store(1, [3], [2])
        worker.wait([1])
    with OffloadWorker([KVGroup([second])], pool.part(1)) as worker:
        with pytest.raises(KVTierError, match="read-only"):
            worker.submit_store(1, [3], [2])
        worker.submit_load(1, [5], [2])
        worker.wait([1])
    assert page(second, 5) == page(first, 3)
    del worker
    pool.close()


def test_workers_may_place_their_pages_among_each_others() -> None:
    host = np.full((3, 64), 0xA5, np.uint8)
    halves = [one_tensor(8, 8), one_tensor(8, 8)]
    for rank, half in enumerate(halves):
        with OffloadWorker([KVGroup([half], 3, [(8 * rank, 16)])], host) as worker:
            worker.submit_store(1, DeviceBlocks([5, 6, 1, 2], first_blocks=[2]), [2, 0])
            worker.wait([1])
    pages = {block: [page(half, block) for half in halves] for block in (5, 6, 1, 2)}
    assert host[2].tobytes() == b"\xa5" * 32 + b"".join(pages[5]) + b"\xa5" * 16
    assert host[0].tobytes() == b"".join(pages[6] + pages[1] + pages[2]) + b"\xa5" * 16
    whole = KVTensor(torch.zeros(4, 16, dtype=torch.uint8))
    with OffloadWorker([KVGroup([whole], 3)], host) as worker:
        worker.submit_load(1, [3, 0], [0])
        worker.wait([1])
    assert page(whole, 3) + page(whole, 0) == b"".join(pages[6] + pages[1])


def test_large_blocks_are_copied_in_parts_by_all_threads() -> None:
    kv = one_tensor(8, 5 * 1024 * 1024 + 13)
    host = np.zeros((8, kv.page_bytes), np.uint8)
    with OffloadWorker([KVGroup([kv])], host, device=CPUDevice(threads=3)) as worker:
        worker.submit_store(1, [6, 1, 2, 3], [0, 5, 6, 2])
        worker.wait([1])
    for block, slot in ((6, 0), (1, 5), (2, 6), (3, 2)):
        assert page(kv, block) == host[slot].tobytes()
