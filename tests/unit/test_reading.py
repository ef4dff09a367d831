"""What a worker reads from storage, and what it holds in memory meanwhile."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytf.data.order import StepPlan, assign
from raytf.data.pipeline import Pipeline
from raytf.data.sources import WINDOW_RECORDS, ParquetSource

SHARDS, GROUPS, GROUP_ROWS = 4, 66, 20
RECORDS = SHARDS * GROUPS * GROUP_ROWS - 7
MB = 1 << 20


@pytest.fixture(scope="module")
def many_groups(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Two files with 66 row groups a shard, whose borders are not those of shards."""
    folder = tmp_path_factory.mktemp("groups")
    numbers = np.arange(RECORDS)
    for part, name in ((numbers[: RECORDS // 3], "a"), (numbers[RECORDS // 3 :], "b")):
        table = pa.table({"image": part.astype(np.float32), "label": (part % 10).astype(np.int32)})
        pq.write_table(table, folder / f"{name}.parquet", row_group_size=GROUP_ROWS)
    return str(folder)


def read_epochs(pipeline: Pipeline, epochs: int, call_steps: int) -> list[np.ndarray]:
    """The records of all steps as the worker reads them: calls of several steps, two of them ahead."""
    plan, seen, pending = pipeline.plan, [], []
    total, asked = epochs * plan.steps_per_epoch, 0
    while asked < total or pending:
        while asked < total and len(pending) < 2:
            end = plan.call_end(asked, call_steps, total)
            pending.append(pipeline.submit(asked, end))
            asked = end
        call = pending.pop(0).result()
        images = call.leaves[0]
        for shard, count in enumerate(call.counts):
            seen.append(images[:, shard, :count].ravel())
    return seen


@pytest.mark.parametrize("window", [64, WINDOW_RECORDS])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_worker_reads_little_more_than_its_share(many_groups: str, world_size: int, window: int):
    epochs, plan = 2, StepPlan(RECORDS, 64, SHARDS)
    everyone = []
    for own in assign(SHARDS, world_size):
        source = ParquetSource(many_groups, window=window)
        pipeline = Pipeline(source, plan, own, seed=3)
        before = source.rows_read
        records = np.concatenate(read_epochs(pipeline, epochs, call_steps=5))
        pipeline.close()
        share = epochs * sum(int(plan.bounds[v + 1] - plan.bounds[v]) for v in own)
        assert len(records) == share
        assert source.rows_read - before <= 1.1 * share
        everyone.append(records)
    assert np.bincount(np.concatenate(everyone).astype(int), minlength=RECORDS).tolist() == [epochs] * RECORDS


READER = """
import json, resource, sys, threading, time
import numpy as np
from raytf.data.order import StepPlan, assign
from raytf.data.pipeline import Pipeline
from raytf.data.sources import ArraySource, ParquetSource


def held():
    return int(next(l for l in open("/proc/self/status") if l.startswith("RssAnon")).split()[1]) << 10

kind, path = sys.argv[1:]
before, most, done = held(), [0], threading.Event()

def watch():
    while not done.wait(0.005):
        most[0] = max(most[0], held())

watcher = threading.Thread(target=watch)
watcher.start()
if kind == "parquet":
    source = ParquetSource(path, x="image", y=None, window=256)
else:
    source = ArraySource(np.load(path, mmap_mode="r"))
plan = StepPlan(source.records, 64, 4)
pipeline = Pipeline(source, plan, assign(4, 1)[0], seed=0)
records = 0
total, asked, pending = plan.steps_per_epoch, 0, []
while asked < total or pending:
    while asked < total and len(pending) < 2:
        end = plan.call_end(asked, 4, total)
        pending.append(pipeline.submit(asked, end))
        asked = end
    records += pending.pop(0).result().records
pipeline.close()
done.set()
watcher.join()
print(json.dumps({"records": records, "bytes": most[0] - before}))
"""


@pytest.mark.parametrize("kind", ["parquet", "memory-mapped array"])
def test_memory_is_bounded_by_the_window_and_not_by_the_data(tmp_path: Path, kind: str):
    # 512 MB of records, which compress to next to nothing; the limit is a third of them.
    width, records, limit = 4096, 32_768, 170 * MB
    if kind == "parquet":
        path = tmp_path / "data.parquet"
        field = pa.field("image", pa.list_(pa.float32(), width))
        with pq.ParquetWriter(path, pa.schema([field])) as writer:
            for start in range(0, records, 128):
                values = np.repeat(np.arange(start, start + 128, dtype=np.float32), width)
                column = pa.FixedSizeListArray.from_arrays(values, width)
                writer.write_table(pa.table([column], schema=pa.schema([field])), row_group_size=128)
    else:
        path = tmp_path / "data.npy"
        mapped = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=(records, width))
        mapped.flush()
    run = subprocess.run(
        [sys.executable, "-c", READER, kind, str(path)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[2],
    )
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout)
    assert found["records"] == records
    assert records * width * 4 > 2 * limit
    assert found["bytes"] < limit, f"{found['bytes'] / MB:.0f} MB"
