"""Runs the targets of ``make fuzz`` on the saved inputs, and on randomly changed copies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fuzz.corpus import read_corpus
from support.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_saved_inputs_are_read_or_refused(name: str) -> None:
    inputs = read_corpus(name)
    assert inputs
    for data in inputs:
        TARGETS[name](data)


@pytest.mark.parametrize("name", TARGETS)
@given(draw=st.data())
def test_changed_inputs_are_read_or_refused(name: str, draw: st.DataObject) -> None:
    data = draw.draw(st.sampled_from(read_corpus(name)))
    at = draw.draw(st.integers(0, len(data)))
    put, left_out = draw.draw(st.binary(max_size=8)), draw.draw(st.integers(0, 8))
    TARGETS[name](data[:at] + put + data[at + left_out :])
