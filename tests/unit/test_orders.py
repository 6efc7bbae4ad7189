"""Evaluations on their way to the engine: packets that compiled code reads, and all others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from warpfit.losses import Closing
from warpfit.request import Loss, Precision, Tier
from warpfit_server.channel import packed, unpacked
from warpfit_server.frame import Extra, Frame
from warpfit_server.orders import NUMBERS_BYTES, PLAIN, Evaluate, Numbers
from warpfit_server.segments import Segment

COUNTS = st.integers(1, 1 << 40)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
PLAIN_ORDER = Evaluate(
    size=0,
    keep=True,
    frame=Frame(30, 4, 6, 2, 7, np.dtype("<f4"), values=False, losses=True),
    dataset_id=bytes(range(32)),
    rows=(3, 10),
    precision=Precision.FAST,
    loss=Loss.R2,
    tier=Tier.AUTO,
    submitted=123,
    tenant="a b",
    request_id="c d",
)


def kind(packet: bytes) -> bytes:
    size = np.frombuffer(packet, np.int64, 2)[1]
    return packet[NUMBERS_BYTES : NUMBERS_BYTES + size]


@given(
    counts=st.tuples(COUNTS, COUNTS, COUNTS, COUNTS, COUNTS),
    dtype=st.sampled_from(["<f4", "<f8"]),
    rows=st.tuples(COUNTS, COUNTS),
    precision=st.sampled_from(Precision),
    loss=st.sampled_from(Loss),
    tier=st.sampled_from(Tier),
    submitted=COUNTS,
    dataset=st.binary(max_size=40),
    texts=st.tuples(TEXTS, TEXTS),
)
def test_plain_evaluations_arrive_as_they_were_sent(
    counts, dtype, rows, precision, loss, tier, submitted, dataset, texts
):
    frame = Frame(*counts, np.dtype(dtype), values=False, losses=True)
    order = Evaluate(
        *(0, True, frame, dataset, rows, precision, loss, tier, submitted),
        tenant=texts[0],
        request_id=texts[1],
    )
    packet = packed(order)
    assert packet[0] == PLAIN
    assert unpacked(memoryview(packet)) == order


@pytest.mark.parametrize(
    "change",
    [
        {"size": 4096},
        {"keep": False},
        {"loss": None, "closing": Closing.MEAN},
        {"wishes": ("gradient",)},
        {"urgent": True},
        {"frame": replace(PLAIN_ORDER.frame, values=True)},
        {"frame": replace(PLAIN_ORDER.frame, extras=(Extra("scaling", "<f8", (4, 2, 2)),))},
    ],
    ids=lambda change: next(iter(change)),
)
def test_all_others_are_pickled(change):
    order = replace(PLAIN_ORDER, **change)
    packet = packed(order)
    assert packet[0] != PLAIN
    assert unpacked(memoryview(packet)) == order


def test_the_numbers_say_where_the_arrays_lie():
    frame = PLAIN_ORDER.frame
    numbers = Numbers(*np.frombuffer(packed(PLAIN_ORDER), np.int64, NUMBERS_BYTES // 8).tolist())
    segment = Segment.create(1, frame.nbytes)
    batch, losses = frame.batch(segment), frame.losses_view(segment)
    start = frame.flag(segment).ctypes.data
    assert numbers.values_at == batch.values.ctypes.data - start
    assert numbers.parameters_at == batch.parameters.ctypes.data - start
    assert numbers.lengths_at == batch.lengths.ctypes.data - start
    assert numbers.counts_at == batch.parameter_counts.ctypes.data - start
    assert numbers.codes_at == batch.codes.ctypes.data - start
    assert numbers.losses_at == losses.ctypes.data - start
    assert (numbers.tokens, numbers.programs) == (30, 4)
    assert (numbers.parameters, numbers.vectors) == (6, 2)


def test_evaluations_of_a_kind_differ_in_their_batch_alone():
    other = replace(
        PLAIN_ORDER, frame=replace(PLAIN_ORDER.frame, tokens=31), submitted=9, request_id="x"
    )
    assert kind(packed(other)) == kind(packed(PLAIN_ORDER))


@pytest.mark.parametrize(
    "change",
    [
        {"dataset_id": bytes(32)},
        {"rows": (3, 11)},
        {"rows": (2, 10)},
        {"precision": Precision.PRECISE},
        {"loss": Loss.MSE},
        {"tier": Tier.INTERPRETER},
        {"tenant": "a"},
        {"frame": replace(PLAIN_ORDER.frame, dtype=np.dtype("<f8"))},
    ],
    ids=lambda change: next(iter(change)),
)
def test_everything_else_makes_another_kind(change):
    assert kind(packed(replace(PLAIN_ORDER, **change))) != kind(packed(PLAIN_ORDER))
