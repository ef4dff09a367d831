"""What one worker takes from storage and from memory does not grow with the data: measured, and enforced."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raytf.data import ParquetSource
from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan, assign
from raytf.data.sources import fingerprint
from tests.data.reading import calls

ROOT = Path(__file__).parents[2]
MB = 1 << 20
SHARDS, WIDTH = 4, 8192


@pytest.fixture(scope="module")
def groups(tmp_path_factory: pytest.TempPathFactory) -> str:
    """64 row groups a shard, of 12 to 20 records of noise, in three files, with a column that nobody wants."""
    folder, rng = tmp_path_factory.mktemp("groups"), np.random.default_rng(0)
    schema = pa.schema([(name, pa.list_(pa.uint8(), WIDTH)) for name in ("x", "other")])
    sizes = rng.integers(12, 21, SHARDS * 64)
    for f, part in enumerate(np.array_split(sizes, 3)):
        with pq.ParquetWriter(folder / f"{f}.parquet", schema, compression="none") as writer:
            for size in part:
                noise = [rng.integers(0, 256, size * WIDTH, np.uint8) for _ in schema]
                lists = [pa.FixedSizeListArray.from_arrays(pa.array(n), WIDTH) for n in noise]
                writer.write_table(pa.table(lists, schema))
    return str(folder)


def _bytes_asked_for() -> int:
    return int(next(line for line in Path("/proc/self/io").open() if line.startswith("rchar")).split()[1])


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_a_worker_reads_at_most_a_tenth_more_than_its_share(groups: str, world_size: int):
    """The first epoch, with all that a worker reads before it: footers, a sample, what identifies the data."""
    for own in assign(SHARDS, world_size):
        source = ParquetSource(groups, x="x", y=None, window=200)
        source.__setstate__(source.__getstate__())  # as it arrives at a worker
        plan = StepPlan(source.records, 64, SHARDS)
        share = int(plan.bounds[own.stop] - plan.bounds[own.start])
        began, records = _bytes_asked_for(), 0
        fingerprint(source)
        with closing(Pipeline(source, plan, own, seed=3)) as pipeline:
            pipeline.sample()
            for call in calls(pipeline, 1, [1, 2, 5, 32]):
                records += int(call.counts.sum()) * (call.stop - call.start)
        asked = _bytes_asked_for() - began
        assert records == share
        assert share <= source.rows_read <= 1.1 * share
        assert share * WIDTH <= asked <= 1.1 * share * WIDTH
        print(f"W={world_size} rows {source.rows_read / share:.3f} bytes {asked / share / WIDTH:.3f}")


def test_a_footer_is_read_once_by_all_readers_and_threads_of_a_source(groups: str):
    source = ParquetSource(groups, x="x", y=None)
    source.__setstate__(source.__getstate__())

    def asked_by(readers: int) -> int:
        began, together = _bytes_asked_for(), threading.Barrier(readers)

        def read() -> None:
            reader = source.reader(1)
            together.wait(60)
            assert len(reader.take(np.zeros(1, np.int64))[0]) == 1

        with ThreadPoolExecutor(readers) as pool:
            for reading in [pool.submit(read) for _ in range(readers)]:
                reading.result()
        return _bytes_asked_for() - began

    first, later = asked_by(8), asked_by(8)
    group = int(source.block_sizes[0]) * WIDTH
    # Arrow takes the last 64 KiB of a file for its footer; what else this process reads meanwhile is little.
    assert 8 * group <= later <= 8 * group + (48 << 10)
    assert first - later == pytest.approx(64 << 10, abs=16 << 10)


#: 614 MB of records, and what a process may take of memory for itself beyond its imports.
RECORDS, FLOATS, LIMIT = 150_000, 1024, 256 * MB


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Row groups of 512 records of 4 KiB that compress to next to nothing."""
    folder = tmp_path_factory.mktemp("large")
    kind = pa.list_(pa.float32(), FLOATS)
    with pq.ParquetWriter(folder / "a.parquet", pa.schema([("x", kind)])) as writer:
        for start in range(0, RECORDS, 512):
            numbers = np.arange(start, min(start + 512, RECORDS), dtype=np.float32)
            column = pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(numbers, FLOATS)), FLOATS)
            writer.write_table(pa.table({"x": column}))
    return folder


def _read(path: Path, window: int, limit: int, pool: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.data.reading", str(path), str(window), str(limit)],
        env={**os.environ, "ARROW_DEFAULT_MEMORY_POOL": pool},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )


def _told(run: subprocess.CompletedProcess[str]) -> tuple[dict[str, int], dict[str, int]]:
    assert run.returncode == 0, run.stderr
    told = json.loads(run.stdout)
    assert RECORDS * FLOATS * 4 > 2 * LIMIT
    print({k: (told["after"][k] - told["before"][k]) // MB for k in ("VmHWM", "RssAnon", "VmData")}, "MB")
    return told["before"], told["after"]


def test_parquet_larger_than_the_memory_that_there_is(large: Path):
    # Arrow's own allocator asks for 1 GiB of addresses at once, which the limit would count; malloc for what it needs.
    _told(_read(large, 1024, LIMIT, "system"))


def test_memory_that_is_resident_with_arrow_s_own_allocator(large: Path):
    before, after = _told(_read(large, 1024, 64 * LIMIT, "mimalloc"))
    assert after["VmHWM"] - before["VmRSS"] < LIMIT


def test_a_window_as_large_as_the_data_needs_more_than_the_limit(large: Path):
    """The limit is one: what is said to bound memory does."""
    run = _read(large, RECORDS, LIMIT, "system")
    assert run.returncode != 0
    assert "MemoryError" in run.stderr


def test_a_mapped_array_larger_than_the_memory_that_there_is(tmp_path: Path):
    path = tmp_path / "x.npy"
    x = np.lib.format.open_memmap(path, "w+", np.float32, (RECORDS, FLOATS))
    for start in range(0, RECORDS, 10_000):
        x[start : start + 10_000] = np.arange(start, start + 10_000, dtype=np.float32)[:, None]
    del x
    try:
        _told(_read(path, 1, LIMIT, "system"))
    finally:
        path.unlink()
