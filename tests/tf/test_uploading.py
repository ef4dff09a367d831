"""Batches that were sent to a device ahead of their step train as those do that go with it."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
import tensorflow as tf

from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan
from raytf.data.sources import ArraySource
from raytf.training.session import Upload

CPU = "CPU:0"


def leaves(*dtypes: str) -> list[np.ndarray]:
    return [np.arange(64).reshape(2, 1, 32).astype(dtype) for dtype in dtypes]


def test_what_a_function_reads_from_the_host_stays_there():
    given = leaves("float32", "uint8", "int64", "bool", "int32", "str")
    sent = Upload(CPU, 3)(given)
    assert [isinstance(leaf, tf.Tensor) for leaf in sent] == [True] * 4 + [False] * 2
    for before, after in zip(given, sent, strict=True):
        np.testing.assert_array_equal(before, np.asarray(after))
    assert all(leaf.device.endswith("/device:CPU:0") for leaf in sent[:4])


@pytest.mark.parametrize(("most", "goes"), [(3 * 256, True), (3 * 256 - 1, False)])
def test_a_call_that_is_larger_than_its_part_goes_when_it_runs(most, goes):
    sent = Upload(CPU, 3, most)(leaves("float32", "int32"))
    assert isinstance(sent[0], tf.Tensor) is goes


def test_calls_of_a_pipeline_are_sent_by_the_thread_that_gathers_them():
    x, y = np.arange(64, dtype=np.float32).reshape(32, 2), np.arange(32)
    source, plan = ArraySource(x, y), StepPlan(32, 8, 2)
    with (
        closing(Pipeline(source, plan, range(2), 0)) as plain,
        closing(Pipeline(source, plan, range(2), 0)) as sending,
    ):
        sending.send = Upload(CPU, 3)
        for start in range(4):
            call, sent = (pipeline.submit(start, start + 1).result() for pipeline in (plain, sending))
            assert all(isinstance(leaf, tf.Tensor) for leaf in sent.leaves)
            for before, after in zip(call.leaves, sent.leaves, strict=True):
                np.testing.assert_array_equal(before, after.numpy())
