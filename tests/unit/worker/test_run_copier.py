"""The loops that copy runs on the CPU: compiled, or the kernel's."""

from __future__ import annotations

import sys
from collections.abc import Callable

import numpy as np
import pytest
import torch
from support.gated_copies import filled

from kvtier_sdk.worker.run_copier import RunCopier, compiled_copier, kernel_copier, run_copier


@pytest.mark.parametrize("make", [compiled_copier, kernel_copier])
def test_each_copier_copies_more_runs_than_one_call_takes(make: Callable[[], RunCopier]) -> None:
    source, target = filled(2500, 32), torch.zeros(2500, 32, dtype=torch.uint8)
    into = np.random.default_rng(0).permutation(2500)
    make()(
        target.data_ptr() + into * 32,
        source.data_ptr() + np.arange(2500) * 32,
        np.full(2500, 32, np.int64),
    )
    assert torch.equal(target[torch.from_numpy(into)], source)


def test_the_kernel_says_when_it_cannot_copy() -> None:
    there = np.zeros(8, np.uint8)
    with pytest.raises(OSError, match="process_vm_readv"):
        kernel_copier()(np.array([there.ctypes.data]), np.array([8]), np.array([8]))
    addresses = np.array([there.ctypes.data] * 2)
    with pytest.raises(OSError, match="stopped after 8 bytes"):
        kernel_copier()(addresses, np.array([there.ctypes.data, 8]), np.array([8, 8]))


def test_a_machine_without_numba_copies_with_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(ImportError):
        compiled_copier()
    copier = run_copier.__wrapped__()
    source, target = np.arange(9), np.zeros(9, np.int64)
    copier(np.array([target.ctypes.data]), np.array([source.ctypes.data]), np.array([72]))
    assert (source == target).all()


def test_a_machine_whose_numba_does_not_work_copies_with_the_kernel(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def njit(*_: object, **__: object) -> object:
        raise ValueError("unknown attr 'nocapture'")

    monkeypatch.setattr("numba.njit", njit)
    copier = run_copier.__wrapped__()
    source, target = np.arange(9), np.zeros(9, np.int64)
    copier(np.array([target.ctypes.data]), np.array([source.ctypes.data]), np.array([72]))
    assert (source == target).all()
    assert "numba cannot compile here, so copies are slower: unknown attr" in caplog.text
