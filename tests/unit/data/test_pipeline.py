"""Batches for one worker, from arrays and without TensorFlow."""

import itertools
import threading
from contextlib import closing

import numpy as np
import pytest

from raytf.data import ArraySource, ParquetSource
from raytf.data.order import EpochOrder
from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan
from raytf.data.sources.writer import FileLayout, write
from raytf.errors import DataError
from raytf.storage.storage import Storage


def pipeline(n=11, batch=4, shards=2, mine=None, y=None, sample_weight=None, **more):
    source = ArraySource(np.arange(n), y, sample_weight)
    made = Pipeline(source, StepPlan(n, batch, shards), mine or range(shards), seed=0, **more)
    made.prepare(seeds_per_shard=1, classes=None)
    return closing(made)


def test_shapes_of_several_steps():
    with pipeline() as p:
        call = p.submit(0, 2).result()
    assert call.leaves[0].shape == (2, 2, 2)
    assert (call.full, call.counts.tolist(), call.records) == (True, [2, 2], 8)
    assert call.seeds.shape == (2, 2, 1, 2)


def test_the_last_step_is_padded_and_says_so():
    with pipeline() as p:
        call = p.submit(2, 3).result()
    assert call.leaves[0].shape == (1, 2, 2)
    assert (call.full, call.counts.tolist(), call.records) == (False, [1, 2], 3)


def test_without_shuffle_an_epoch_is_in_the_order_of_the_source():
    with pipeline(n=8, shards=1, shuffle=False) as p:
        assert p.submit(0, 2).result().leaves[0].ravel().tolist() == list(range(8))


def test_one_call_or_many_give_the_same():
    with pipeline() as p:
        once = p.submit(0, 2).result().leaves[0]
        apart = [p.submit(s, s + 1).result().leaves[0] for s in range(2)]
    assert np.array_equal(once, np.concatenate(apart))


def test_class_weights_become_sample_weights():
    with pipeline(n=4, batch=4, shards=1, y=np.array([0, 1, 2, 1]), class_weight={0: 0.5, 1: 2.0}) as p:
        x, y, weight = p.submit(0, 1).result().leaves
    assert weight.ravel().tolist() == [{0: 0.5, 1: 2.0, 2: 1.0}[label] for label in y.ravel().tolist()]
    assert sorted(x.ravel().tolist()) == [0, 1, 2, 3]


def test_class_weights_multiply_sample_weights():
    with pipeline(
        n=2, batch=2, shards=1, y=np.array([0, 1]), sample_weight=np.array([3.0, 5.0]), class_weight={1: 2.0}
    ) as p:
        _, y, weight = p.submit(0, 1).result().leaves
    assert weight.ravel().tolist() == [{0: 3.0, 1: 10.0}[label] for label in y.ravel().tolist()]


def test_class_weights_with_several_targets():
    with pytest.raises(DataError, match="class_weight needs one target"):
        pipeline(y={"a": np.zeros(11, int)}, class_weight={0: 1.0})


def test_a_worker_without_records_in_the_last_step_has_all_leaves():
    """Class weights are a leaf that the source does not have."""
    source, plan = ArraySource(np.zeros((9, 2)), np.zeros(9, int)), StepPlan(9, 8, 4)
    with closing(Pipeline(source, plan, range(3), seed=0, shuffle=False, class_weight={0: 2.0})) as made:
        made.prepare(seeds_per_shard=0, classes=None)
        call = made.submit(1, 2).result()
    assert call.counts.tolist() == [0, 0, 0]
    assert [leaf.shape for leaf in call.leaves] == [(1, 3, 2, 2), (1, 3, 2), (1, 3, 2)]


@pytest.mark.parametrize("order", ["blocks", "records"])
def test_blocks_that_are_read_ahead_give_the_same_records(tmp_path, order):
    x = (np.arange(600) % 251).astype(np.uint8).reshape(300, 2)
    arrays = ArraySource(x, np.arange(300))
    write(Storage(str(tmp_path)), arrays, FileLayout("parquet", 100, 7), "test")
    source, plan = ParquetSource(str(tmp_path), window=20, order=order), StepPlan(300, 8, 2)
    epoch = EpochOrder(plan, source.block_sizes, 0, 0, source.window)
    reader = source.reader(2)
    with closing(Pipeline(reader, plan, range(2), seed=0)) as made:
        made.prepare(seeds_per_shard=0, classes=None)
        step, lengths = 0, itertools.cycle([1, 5, 2, 17])
        while step < plan.steps_per_epoch:
            end = plan.call_end(step, next(lengths), plan.steps_per_epoch)
            call = made.submit(step, end).result()
            for k in range(end - step):
                for shard, count in enumerate(call.counts):
                    ids = epoch.records(shard, (step + k) * 4, (step + k + 1) * 4)
                    assert call.leaves[1][k, shard, :count].tolist() == ids.tolist()
                    assert (call.leaves[0][k, shard, :count] == x[ids]).all()
            step = end


class Held(ArraySource):
    """Records that are given once somebody lets go."""

    def __init__(self, *arrays):
        super().__init__(*arrays)
        self.is_asked, self.go = threading.Event(), threading.Event()
        self.go.set()

    def take(self, ids):
        self.is_asked.set()
        assert self.go.wait(30)
        return super().take(ids)


def test_a_pipeline_of_other_shards_sends_as_this_one_does():
    """Workers may meet again, and so have other shards, while a batch with another worker's shard is gathered."""
    source = Held(np.arange(12), None, None)
    made = Pipeline(source, StepPlan(12, 6, 3), range(1), seed=0)
    made.prepare(seeds_per_shard=1, classes=None)
    made.send = lambda leaves: ["sent", *leaves]
    source.is_asked.clear()
    source.go.clear()
    beside = made.submit(0, 1, beside=2)
    assert source.is_asked.wait(30)
    other = made.of(range(2))
    source.go.set()
    with closing(other):
        assert other.submit(0, 1).result(30).leaves[0] == "sent"
    call = beside.result(30)
    assert (call.leaves[0], call.leaves[1].shape) == ("sent", (1, 2, 2))
    assert call.counts.tolist() == [2, 2]
