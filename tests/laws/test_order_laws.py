"""The data order: every record exactly once an epoch, and no world size in it."""

import itertools
import tempfile
from contextlib import ExitStack, closing

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.data import ArraySource, ParquetSource
from raytf.data.order import EpochOrder, argsort, fold, permutation, step_seeds
from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan, assign, imbalance
from tests.laws import checks
from tests.laws.checks import Stretch


@st.composite
def plans(draw, most=200):
    """N records, global batches of G, V shards, of which every second time V divides G."""
    shards, micro = draw(st.integers(1, 9)), draw(st.integers(1, 8))
    size = shards * micro if draw(st.booleans()) else draw(st.integers(1, 72))
    return StepPlan(draw(st.integers(1, most)), size, shards)


@st.composite
def block_sizes(draw, records):
    """None, blocks of one record, one block of all, or any."""
    kind = draw(st.sampled_from(["none", "ones", "whole", "any", "any"]))
    if kind == "any":
        cuts = draw(st.sets(st.integers(1, records), max_size=12)) | {0, records}
        return np.diff(sorted(cuts))
    return {"none": None, "ones": np.ones(records, np.int64), "whole": np.array([records])}[kind]


@st.composite
def stretches(draw, plan):
    """Groups of workers that follow each other through two epochs."""
    steps = st.integers(1, 2 * plan.steps_per_epoch)
    calls = st.lists(st.integers(1, 9), min_size=1, max_size=4)
    one = st.builds(Stretch, st.integers(1, plan.shards), st.integers(0, 5), steps, calls)
    return draw(st.lists(one, max_size=5))


@st.composite
def orders(draw):
    plan = draw(plans())
    sizes = draw(block_sizes(plan.records))
    return EpochOrder(
        plan,
        sizes,
        seed=draw(st.integers(0, 2**40)),
        epoch=draw(st.integers(0, 1000)),
        window=draw(st.integers(1, 50)),
        shuffle=draw(st.booleans()),
    )


def step_records(order, step):
    return [order.records(v, step * b, (step + 1) * b) for v, b in enumerate(order.plan.sizes)]


@given(orders())
def test_every_record_exactly_once_an_epoch(order):
    steps = [np.concatenate(step_records(order, s)) for s in range(order.plan.steps_per_epoch)]
    assert np.sort(np.concatenate(steps)).tolist() == list(range(order.plan.records))
    assert all(len(s) for s in steps)


@settings(max_examples=200)
@given(plans(), st.data())
def test_a_sequence_of_worlds_reads_every_record_exactly_once(plan, data):
    """Whatever the sequence of world sizes, restarts and calls: shards have the records that one worker would read."""
    sizes = data.draw(block_sizes(plan.records))
    seed, window = data.draw(st.integers(0, 2**40)), data.draw(st.integers(1, 50))
    world = checks.orders(plan, lambda _, epoch: EpochOrder(plan, sizes, seed, epoch, window))
    boundary = data.draw(st.none() | st.integers(1, 20))
    seen = checks.check_run(plan, world, data.draw(stretches(plan)), 2, boundary)
    assert seen == checks.check_run(plan, world, [], 2, None)


@settings(max_examples=15)
@given(plans(most=60), st.integers(0, 1000), st.data())
def test_a_sequence_of_worlds_reads_arrays_through_pipelines(plan, seed, data):
    source = ArraySource(np.arange(plan.records))
    world = checks.pipelines(plan, lambda own: Pipeline(source, plan, own, seed))
    seen = checks.check_run(plan, world, data.draw(stretches(plan)), 2, data.draw(st.none() | st.integers(1, 9)))
    order = checks.orders(plan, lambda _, epoch: EpochOrder(plan, None, seed, epoch))
    assert seen == checks.check_run(plan, order, [], 2, None)


@settings(max_examples=15)
@given(plans(most=60), st.integers(0, 1000), st.data())
def test_a_sequence_of_worlds_reads_parquet_through_pipelines(plan, seed, data):
    sizes = data.draw(block_sizes(plan.records).filter(lambda sizes: sizes is not None))
    window = data.draw(st.integers(1, 30))
    with tempfile.TemporaryDirectory() as folder:
        half, records = len(sizes) // 2, iter(range(plan.records))
        for name, groups in (("a", sizes[:half]), ("b", sizes[half:])):
            with pq.ParquetWriter(f"{folder}/{name}.parquet", pa.schema([("x", pa.int64())])) as writer:
                for size in groups:
                    writer.write_table(pa.table({"x": list(itertools.islice(records, int(size)))}))
        source = ParquetSource(folder, x="x", y=None, window=window)
        assert source.block_sizes.tolist() == sizes.tolist()
        world = checks.pipelines(plan, lambda own: Pipeline(source, plan, own, seed))
        seen = checks.check_run(plan, world, data.draw(stretches(plan)), 2, None)
    order = checks.orders(plan, lambda _, epoch: EpochOrder(plan, sizes, seed, epoch, window))
    assert seen == checks.check_run(plan, order, [], 2, None)


@given(plans(), st.integers(0, 2**40), st.integers(1, 50))
def test_records_read_alone_are_blocks_of_one(plan, seed, window):
    alone, blocks = (EpochOrder(plan, s, seed, 3, window) for s in (None, np.ones(plan.records, np.int64)))
    for shard in range(plan.shards):
        assert alone.records(shard, 0, plan.records).tolist() == blocks.records(shard, 0, plan.records).tolist()


@given(plans(), st.data())
def test_a_shuffle_stays_within_windows_and_blocks(plan, data):
    """What bounds memory: a window has the records of the blocks that lie there, each block in one piece."""
    sizes = data.draw(block_sizes(plan.records).filter(lambda sizes: sizes is not None))
    window, shard = data.draw(st.integers(1, 50)), data.draw(st.integers(0, plan.shards - 1))
    order, plain = (EpochOrder(plan, sizes, 1, 2, w) for w in (window, 1))
    for start in range(0, int(plan.bounds[shard + 1] - plan.bounds[shard]), window):
        mixed, unmixed = (o.records(shard, start, start + window) for o in (order, plain))
        assert np.sort(mixed).tolist() == np.sort(unmixed).tolist()
        blocks = np.searchsorted(np.cumsum(sizes), unmixed, side="right")
        assert (np.diff(blocks) != 0).sum() == len(np.unique(blocks)) - 1


@given(orders())
def test_counts_say_what_records_gives(order):
    for step in range(order.plan.steps_per_epoch):
        counts = order.plan.counts(step)
        assert [len(r) for r in step_records(order, step)] == counts.tolist()
        assert order.plan.is_full(step) == (counts == order.plan.sizes).all()
        assert order.plan.records_of(step) == counts.sum()


@given(plans(), st.data())
def test_a_rank_counts_its_own_shards_alone(plan, data):
    low = data.draw(st.integers(0, plan.shards - 1))
    own = range(low, data.draw(st.integers(low + 1, plan.shards)))
    step = data.draw(st.integers(0, plan.steps_per_epoch - 1))
    assert plan.counts(step, own).tolist() == plan.counts(step)[own.start : own.stop].tolist()


@given(plans())
def test_all_steps_are_full_but_the_last(plan):
    assert plan.steps_per_epoch - plan.full_steps in (0, 1)
    counts = plan.counts(plan.steps_per_epoch - 1)
    assert counts.max() - counts.min() <= (1 if plan.is_even else 2)
    assert counts.sum() == plan.records - (plan.steps_per_epoch - 1) * plan.global_batch_size


@given(orders(), st.data())
def test_a_range_is_the_same_read_whole_or_in_parts(order, data):
    shard = data.draw(st.integers(0, order.plan.shards - 1))
    length = int(order.plan.bounds[shard + 1] - order.plan.bounds[shard])
    cut = data.draw(st.integers(0, length))
    whole = order.records(shard, 0, length)
    parts = order.records(shard, 0, cut).tolist() + order.records(shard, cut, length).tolist()
    assert whole.tolist() == parts
    if cut < length:  # a restart in the middle knows nothing of what came before
        assert order.records(shard, cut, cut + 1)[0] == whole[cut]


@given(plans())
def test_without_shuffle_the_order_is_the_source_s(plan):
    order = EpochOrder(plan, None, 0, 0, shuffle=False)
    whole = [order.records(v, 0, plan.records) for v in range(plan.shards)]
    assert np.concatenate(whole).tolist() == list(range(plan.records))


@given(st.integers(0, 2**40), st.integers(0, 1000))
def test_epochs_and_seeds_differ(seed, epoch):
    plan = StepPlan(64, 64, 1)

    def order(*key):
        return EpochOrder(plan, None, *key).records(0, 0, 64).tolist()

    assert order(seed, epoch) == order(seed, epoch)
    assert order(seed, epoch) != order(seed, epoch + 1)
    assert order(seed, epoch) != order(seed + 1, epoch)


@given(st.lists(st.integers(0, 40) | st.integers(0, 2**64 - 1), max_size=60), st.integers(0, 2**64 - 1))
def test_keys_that_differ_in_few_bits_or_none_are_sorted_as_by_numpy(low, high):
    keys = np.array([high ^ bits for bits in low], np.uint64)
    assert argsort(keys).tolist() == np.argsort(keys, kind="stable").tolist()


@given(st.integers(0, 300), st.lists(st.integers(0, 2**40), max_size=3))
def test_permutation_is_one(n, key):
    assert permutation(n, *key).tolist() == np.argsort(fold(*key, np.arange(n)), kind="stable").tolist()
    assert np.sort(permutation(n, *key)).tolist() == list(range(n))


def test_the_order_never_changes():
    """Frozen values: a run that is resumed by a later raytf goes on in the order it began with."""
    order = EpochOrder(StepPlan(20, 4, 2), np.array([7, 3, 10]), seed=1, epoch=2, window=4)
    assert [order.records(v, 0, 10).tolist() for v in range(2)] == [
        [7, 8, 9, 10, 13, 12, 14, 11, 16, 15],
        [0, 19, 17, 18, 4, 1, 3, 2, 6, 5],
    ]
    assert step_seeds(1, np.array([5]), np.array([2]), 2).tolist() == [
        [[[1127059094, 1653303151], [455873861, 2100191661]]]
    ]


@given(st.integers(1, 64), st.integers(1, 64))
def test_assign_is_contiguous_complete_and_even(shards, world_size):
    runs = assign(shards, world_size)
    assert len(runs) == world_size
    assert [v for run in runs for v in run] == list(range(shards))
    assert max(len(run) for run in runs) == -(-shards // world_size)


@given(st.integers(1, 9), st.integers(1, 6))
def test_no_contiguous_assignment_has_a_smaller_largest_load(shards, world_size):
    every = itertools.combinations_with_replacement(range(shards + 1), world_size - 1)
    loads = (np.diff([0, *cuts, shards]).max() for cuts in every)
    assert max(map(len, assign(shards, world_size))) == min(loads)


@settings(max_examples=25)
@given(plans(most=60), st.integers(0, 1000), st.data())
def test_no_world_size_in_the_batches(plan, seed, data):
    """Whoever computes a shard, at a step it has the same records and the same seeds."""
    source = ArraySource(np.arange(plan.records))
    step = data.draw(st.integers(0, 3 * plan.steps_per_epoch - 1))
    worlds = data.draw(st.sets(st.integers(1, plan.shards), min_size=2, max_size=3)) if plan.shards > 1 else {1}
    seen = []
    for world_size in sorted(worlds):
        with ExitStack() as stack:
            ranks = [Pipeline(source, plan, shards, seed) for shards in assign(plan.shards, world_size)]
            for rank in ranks:
                stack.enter_context(closing(rank))
                rank.prepare(seeds_per_shard=2, classes=None)
            calls = [rank.submit(step, step + 1).result() for rank in ranks]
        # Leaves and seeds are [K, L, ...], counts are [L].
        leaves = np.concatenate([c.leaves[0] for c in calls], axis=1)
        seeds = np.concatenate([c.seeds for c in calls], axis=1)
        counts = np.concatenate([c.counts for c in calls])
        seen.append([leaves.tolist(), seeds.tolist(), counts.tolist()])
        assert {c.records for c in calls} == {counts.sum()}
    assert all(other == seen[0] for other in seen)


@given(st.integers(0, 2**62), st.integers(0, 10**9), st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_seeds_are_distinct_and_not_negative(seed, first, steps, shards, count):
    seeds = step_seeds(seed, np.arange(first, first + steps), np.arange(shards), count)
    assert (seeds.shape, seeds.dtype) == ((steps, shards, count, 2), np.int32)
    assert seeds.min() >= 0
    assert len({tuple(pair) for pair in seeds.reshape(-1, 2).tolist()}) == steps * shards * count


@given(st.integers(1, 9))
def test_seeds_are_the_same_whoever_computes_a_shard(shards):
    checks.check_seeds(step_seeds, shards)


@given(st.integers(0, 2**62), st.integers(0, 10**9), st.integers(0, 63))
def test_runs_with_other_seeds_have_other_seeds(seed, step, shard):
    here, there = (step_seeds(s, np.array([step]), np.array([shard]), 3) for s in (seed, seed + 1))
    assert not {tuple(p) for p in here.reshape(-1, 2)} & {tuple(p) for p in there.reshape(-1, 2)}


@given(st.integers(0, 2**62), st.integers(0, 10**6), st.integers(0, 63))
def test_a_seed_does_not_depend_on_its_neighbors(seed, step, shard):
    alone = step_seeds(seed, np.array([step]), np.array([shard]), 1)[0, 0, 0]
    among = step_seeds(seed, np.arange(step, step + 3), np.arange(64), 2)[0, shard, 0]
    assert alone.tolist() == among.tolist()


@given(plans(), st.data())
def test_calls_cover_a_run_and_each_is_full_or_one_step(plan, data):
    total = data.draw(st.integers(1, 4 * plan.steps_per_epoch))
    step = data.draw(st.integers(0, total - 1))
    limit = data.draw(st.integers(1, 50))
    boundary = data.draw(st.none() | st.integers(1, 20))
    while step < total:
        end = plan.call_end(step, limit, total, boundary)
        assert step < end <= min(total, step + limit)
        inside = range(step, end)
        assert len({plan.locate(s)[0] for s in inside}) == 1
        assert len(inside) == 1 or all(plan.is_full(plan.locate(s)[1]) for s in inside)
        if boundary:
            assert not any(s % boundary == 0 for s in inside[1:])
        step = end
    assert step == total


@pytest.mark.parametrize(("n", "batch", "steps"), [(1, 8, 1), (8, 8, 1), (9, 8, 2), (60_000, 128, 469)])
def test_steps_per_epoch_are_those_of_keras(n, batch, steps):
    assert StepPlan(n, batch, 4).steps_per_epoch == steps


@given(plans())
def test_shards_of_a_full_step_differ_by_one_record_at_most(plan):
    assert plan.sizes.sum() == plan.global_batch_size
    assert plan.sizes.max() - plan.sizes.min() <= 1 - plan.is_even
    assert plan.sizes.max() == plan.micro_batch_size


@given(st.integers(1, 64), st.integers(1, 64))
def test_imbalance_is_what_workers_wait_for_the_one_with_most_shards(shards, world_size):
    loads = [len(run) for run in assign(shards, world_size)]
    waits = [max(loads) - load for load in loads]
    assert imbalance(shards, world_size) == pytest.approx(sum(waits) / world_size)
    assert (imbalance(shards, world_size) == 0) == (shards % world_size == 0)
