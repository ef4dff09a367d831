"""Reads epochs as a worker does: calls of several steps, some of them gathered ahead, one at work."""

from __future__ import annotations

import itertools
import json
import resource
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing

import numpy as np

from raytf.data import ArraySource, ParquetSource, Source
from raytf.data.pipeline import CallBatch, Pipeline
from raytf.data.plan import StepPlan

#: As in `raytf/training/synchronous.py`.
PREFETCH = 2


def calls(pipeline: Pipeline, epochs: int, lengths: Sequence[int]) -> Iterator[CallBatch]:
    """The calls of some epochs, of at most the given lengths, again and again."""
    plan, limits = pipeline.plan, itertools.cycle(lengths)
    asked, total, pending = 0, epochs * pipeline.plan.steps_per_epoch, deque()
    while asked < total or pending:
        while asked < total and len(pending) < PREFETCH:
            end = plan.call_end(asked, next(limits), total)
            pending.append(pipeline.submit(asked, end))
            asked = end
        yield pending.popleft().result()


def memory() -> dict[str, int]:
    """Bytes by name, of this process's /proc/self/status."""
    with open("/proc/self/status") as status:
        parts = (line.split() for line in status if line.startswith(("Vm", "Rss")))
        return {name.rstrip(":"): int(number) * 1024 for name, number, _ in parts}


def main(path: str, window: int, extra: int) -> None:
    """Read an epoch as the only worker, with `extra` bytes of memory more than the imports took.

    x of a record is its number, again and again. Prints what was read and the memory that it took, as JSON.

    Args:
        path: a folder of Parquet files, or an .npy file, which is mapped.
        window: within which Parquet is shuffled.
        extra: the limit.
    """
    import pyarrow.parquet  # noqa: F401

    import raytf.storage.storage  # noqa: F401

    before = memory()
    # The limit is on the data segment: private memory that no file stands behind, the threads' stacks included. The
    # address space would count a mapped file whole, and of the resident set its pages are dropped where room is needed.
    limit = before["VmData"] + extra
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    if path.endswith(".npy"):
        source: Source = ArraySource(np.load(path, mmap_mode="r"))
    else:
        source = ParquetSource(path, x="x", y=None, window=window)
    plan = StepPlan(source.records, 256, 4)
    seen = np.zeros(source.records, np.int64)
    with closing(Pipeline(source, plan, range(4), seed=1)) as pipeline:
        pipeline.prepare(1, None)
        for call in calls(pipeline, 1, [1, 8, 3, 8]):
            for i, count in enumerate(call.counts):
                x = call.leaves[0][:, i, :count]
                assert (x == x[..., :1]).all()
                seen[x[..., 0].astype(np.int64).ravel()] += 1
    assert (seen == 1).all()
    print(json.dumps({"before": before, "after": memory()}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
