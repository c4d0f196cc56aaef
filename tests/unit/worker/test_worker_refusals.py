from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from support.gated_copies import Gate, one_tensor

from kvtier_sdk import ConfigError
from kvtier_sdk.worker import DeviceBlocks, KVGroup, KVTensor, OffloadWorker
from kvtier_sdk.worker.cpu import CPUDevice


def test_a_chunk_must_fit_into_a_part() -> None:
    host = np.zeros((4, 127), np.uint8)
    with pytest.raises(ConfigError, match="group 1 has 128 B, a part of a slot only 127 B"):
        OffloadWorker([KVGroup([one_tensor()]), KVGroup([one_tensor()], 2)], host)


def test_a_worker_needs_a_group_on_one_device_that_it_knows() -> None:
    host = np.zeros((4, 64), np.uint8)
    with pytest.raises(ConfigError, match="at least one"):
        OffloadWorker([], host)
    elsewhere = KVGroup([KVTensor(torch.zeros(4, 4, device="meta"))])
    with pytest.raises(ConfigError, match="on one device, not on cpu, meta"):
        OffloadWorker([KVGroup([one_tensor()]), elsewhere], host)
    with pytest.raises(ConfigError, match="no worker for tensors on 'meta'"):
        OffloadWorker([elsewhere], host)


@pytest.mark.parametrize("verb", ["submit_store", "submit_load"])
@pytest.mark.parametrize(
    ("blocks", "slots", "message"),
    [
        (DeviceBlocks([16], [1, 0]), [0], "group 0 must be from 0 to 15, not 16"),
        (DeviceBlocks([-1], [1, 0]), [0], "group 0 must be from 0 to 15, not -1"),
        (DeviceBlocks([0, 1, 9], [2, 1]), [0, 1], "group 1 must be from 0 to 7, not 9"),
        (DeviceBlocks([0], [1, 0]), [6], "slots must be from 0 to 5, not 6"),
        (DeviceBlocks([0], [1, 0]), [-1], "slots must be from 0 to 5, not -1"),
        (DeviceBlocks([0, 1, 2], [3, 0]), [0], "1 slots, but the blocks touch 2 chunks"),
        (DeviceBlocks([0, 1], [2, 0], [1, 0]), [0], "1 slots, but the blocks touch 2 chunks"),
        (DeviceBlocks([0, 1], [2, 0]), [0, 1], "2 slots, but the blocks touch 1 chunks"),
        (DeviceBlocks([0, 1], [1, 0]), [0], "2 block ids, but group_sizes add up to 1"),
        (DeviceBlocks([0], [1]), [0], "group_sizes has 1 groups; there are 2"),
        (DeviceBlocks([0], [1, 0, 0]), [0], "group_sizes has 3 groups; there are 2"),
        (DeviceBlocks([0], [1, 0], [0]), [0], "first_blocks has 1 groups; there are 2"),
        (DeviceBlocks([0], [2, -1]), [0], "group_sizes has a negative number"),
        (DeviceBlocks([0], [1, 0], [-1, 0]), [0], "first_blocks has a negative number"),
        (DeviceBlocks([0.5], [1, 0]), [0], "must be a row of integers"),
        (DeviceBlocks([True], [1, 0]), [0], "must be a row of integers"),
        (DeviceBlocks([[0]], [1, 0]), [0], "must be a row of integers"),
        (DeviceBlocks([0], [1, 0]), [1.0], "slots must be a row of integers"),
        ([0], [0], "group_sizes is needed: there are 2 groups"),
    ],
)
def test_a_job_that_does_not_fit_is_refused_before_anything_is_copied(
    gate: Gate, verb: str, blocks, slots, message: str
) -> None:
    groups = [KVGroup([one_tensor()], 2), KVGroup([one_tensor(8)])]
    device = CPUDevice(threads=1, copy=gate)
    with OffloadWorker(groups, np.zeros((6, 128), np.uint8), device=device) as worker:
        with pytest.raises(ValueError, match=message):
            getattr(worker, verb)(1, blocks, slots)
        assert gate.began == []
        assert worker.get_finished() == []


def test_what_is_written_is_named_once(gate: Gate, gated) -> None:
    worker = gated(one_tensor())
    with pytest.raises(ValueError, match="a store names a slot twice"):
        worker.submit_store(1, [1, 2], [3, 3])
    with pytest.raises(ValueError, match="a load names a block twice"):
        worker.submit_load(1, [1, 1], [3, 4])
    assert gate.began == []
    gate.open()
    # Reading a block twice is allowed, unlike writing it twice.
    worker.submit_store(1, [1, 1], [3, 4])
    worker.wait([1])
    worker.submit_load(2, [1, 2], [3, 3])
    worker.wait([2])
    assert all(result.success for result in worker.get_finished())


def test_without_torch_the_worker_says_what_to_install() -> None:
    code = "import sys; sys.modules['torch'] = None; import kvtier_sdk.worker"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.stderr.strip().endswith(
        "ConfigError: kvtier_sdk.worker needs torch: pip install 'kvtier-sdk[torch]'"
    )
