"""Measures what more workers cost the parts that exist once: the control plane, on the pure code.

    python -m benchmarks.scale.scale

No worker is started. One process does what one rank, rank 0, the monitor or the driver has to do when there are 8 to
4,096 workers, with as many logical shards and with four times as many. What a machine of that size would add, such as
Ray's calls and the network, is not in it: docs/evidence/scaling.md has a model of that.

The last column says how much that grows while the workers become eight times as many, on average: 1 is not at all, 8
is in proportion.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks import harness
from benchmarks.harness import Comparison, Grid, Report
from benchmarks.peers import index_lists
from benchmarks.scale.parts import (
    Stored,
    events,
    excluded,
    heard,
    judged,
    made_shares,
    reduction_of,
    stragglers,
    written,
)
from raytf.checkpoint import codec, manifest, naming
from raytf.data.order import EpochOrder, step_seeds
from raytf.data.plan import StepPlan, assign
from raytf.data.sources.base import WINDOW_RECORDS
from raytf.distributed import step_agreement

WORKERS = (8, 64, 512, 4096)
#: ImageNet's training pictures; records of a logical shard in a step, and where an epoch's are counted.
RECORDS, MICRO_BATCH, EPOCH_BATCH = 1_281_167, 8, 32
#: Records of a block, where the source is read in blocks.
BLOCK = 1024
CALL_STEPS = 8
#: Seconds that a value is measured for, at least.
LEAST_SECONDS = 0.02


@dataclass(frozen=True)
class Model:
    """The parts of a model that are sent: trainable weights and layers' states, and columns for loss and metrics in a
    row."""

    name: str
    tensors: int
    weights: int
    columns: int = 5


#: That of jobs/mnist.py, and keras.applications.ResNet50: 214 weights and 106 moving averages.
MNIST, RESNET = Model("MNIST CNN", 8, 421_642), Model("ResNet-50", 320, 25_636_712)


@dataclass(frozen=True)
class Arguments:
    """Measure what the control plane costs as the number of workers grows."""

    quick: bool = False
    """Fewer records and pairs."""
    pairs: int = 5
    json: Path | None = None


@dataclass
class Benchmark:
    """Collects the rows.

    Attributes:
        report: to which they go.
        pairs: values of each.
        records: of an epoch.
        rows: of the table of all but the comparisons.
    """

    report: Report
    pairs: int
    records: int
    rows: list[list[str]] = field(default_factory=list)

    def read(self, quantity: str, make: Callable[[int], Callable[[], Any]]) -> None:
        """Add a row: milliseconds of CPU time for each number of workers.

        Args:
            make: prepares for this many workers; what it returns is measured.
        """
        self.add(quantity, "ms", [seconds(make(w), self.pairs) * 1e3 for w in WORKERS])

    def add(self, quantity: str, unit: str, found: Sequence[float]) -> None:
        """Add a row of numbers that are known already."""
        growth = (found[-1] / found[0]) ** (1 / (len(found) - 1))
        self.rows.append([quantity, unit, *map(harness.number, found), f"{growth:.1f}"])

    # -- a rank's input ------------------------------------------------------------------------------------------------

    def data(self) -> None:
        """Measure the choice of a rank's records and seeds."""
        for each in (1, 4):
            shards = "V = W" if each == 1 else f"V = {each} W"

            def at_start(w: int, each: int = each) -> Callable[[], Any]:
                def run() -> Any:
                    plan = self._plan(each * w)
                    return assign(each * w, w)[w // 2], plan.bounds

                return run

            def call(w: int, each: int = each) -> Callable[[], Any]:
                plan = self._plan(each * w)
                own, order = assign(each * w, w)[w // 2], EpochOrder(plan, self._blocks(), 1, 0, window=WINDOW_RECORDS)
                return lambda: gather(plan, order, own, 0, min(CALL_STEPS, plan.full_steps))

            self.read(f"start of a rank: its shards and their ranges, {shards}", at_start)
            self.read(f"records and seeds of a call of {CALL_STEPS} steps, {shards}", call)

    def epochs(self) -> None:
        """Measure a whole epoch of a rank, the order and all its records' numbers, in comparison with others."""
        peers: dict[str, Callable[[int], int]] = {
            "torch DistributedSampler": lambda w: index_lists.torch_epoch(self.records, w, w // 2, EPOCH_BATCH, 1),
            "tf.data shard": lambda w: index_lists.tf_data_epoch(self.records, w, w // 2, EPOCH_BATCH),
        }
        for name, peer in list(peers.items()):
            try:
                peer(WORKERS[-1])
            except ImportError as error:
                self.report.notes.append(f"{name} is left out: {error}")
                del peers[name]
        for w in (WORKERS[0], WORKERS[-1]):
            for blocks, of in ((None, "single records"), (self._blocks(), f"records in blocks of {BLOCK:,}")):
                runs = {"raytf": lambda w=w, blocks=blocks: self._epoch(w, blocks)}
                runs |= {name: lambda w=w, peer=peer: peer(w) for name, peer in peers.items()}
                found = harness.rounds(self.pairs, {name: lambda run=run: once(run) for name, run in runs.items()})
                ours = found.pop("raytf")
                for name, theirs in found.items():
                    configuration = f"a rank's batches of an epoch of {self.records:,} {of}, {w:,} workers"
                    self.report.comparisons.append(Comparison(configuration, name, "CPU s", ours, theirs, False))

    def _epoch(self, w: int, blocks: np.ndarray | None) -> int:
        plan, window = StepPlan(self.records, w * EPOCH_BATCH, w), 1 if blocks is None else WINDOW_RECORDS
        own, order, step, count = assign(w, w)[w // 2], EpochOrder(plan, blocks, 1, 1, window=window), 0, 0
        while step < plan.steps_per_epoch:
            stop = plan.call_end(step, CALL_STEPS, plan.steps_per_epoch)
            count += len(gather(plan, order, own, step, stop)[0])
            step = stop
        return count

    def _plan(self, shards: int) -> StepPlan:
        return StepPlan(self.records, shards * MICRO_BATCH, shards)

    def _blocks(self) -> np.ndarray:
        sizes = np.full(-(-self.records // BLOCK), BLOCK)
        sizes[-1] -= sizes.sum() - self.records
        return sizes

    # -- a step --------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Measure what is sent with the gradients, and what a rank computes of it."""
        for model, (reduction, extra), each in itertools.product(
            (MNIST, RESNET), (("float", False), ("fixed point", True)), (1, 4)
        ):
            columns = model.columns + extra * model.tensors
            sizes = [4 * (step_agreement.LENGTH + each * w * columns) / (4 * model.weights) for w in WORKERS]
            name = f"{model.name}, {reduction}, V = {'W' if each == 1 else f'{each} W'}"
            self.add(f"sent in a step beside the gradient, {name}", "% of it", [100 * size for size in sizes])
        for each in (1, 4):
            shards = "V = W" if each == 1 else f"V = {each} W"
            self.read(
                f"rows of a step, {RESNET.tensors} tensors, fixed point, {shards}",
                lambda w, each=each: reduction_of(RESNET.tensors, RESNET.columns, each * w, w),
            )

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def checkpoints(self) -> None:
        """Measure the division of shares, and the manifest."""
        # ResNet-50 with Adam: weights and two moments of each, moving averages, and some numbers.
        sizes = {f"model/{i:05d}/kernel": 1 + 12345 * i % 99_991 for i in range(RESNET.tensors)}
        sizes |= {f"optimizer/{i:05d}/kernel_momentum": 1 + 54321 * i % 99_991 for i in range(2 * 214 + 2)}
        self.read("which rank writes which tensors, ResNet-50 with Adam", lambda w: lambda: codec.shares(sizes, w))
        name = naming.name_of(1000, "20261121T101500.123-3f2a9c", 1)
        run: Any = Stored()

        def write(w: int) -> Callable[[], Any]:
            shares = made_shares(codec.shares(sizes, w))
            return lambda: manifest.write(run, name, 1000, shares, {"history": [], "callbacks": {}})

        def read(w: int) -> Callable[[], Any]:
            write(w)()
            return lambda: manifest.read(run, name)

        def kilobytes(w: int) -> float:
            write(w)()
            return len(run.get(f"{manifest.FOLDER}/{name}/{manifest.FILE}")) / 1000

        self.read("manifest, made", write)
        self.read("manifest, read and verified", read)
        self.add("manifest", "kB", [kilobytes(w) for w in WORKERS])
        self.add("ranks with a share", "", [len(made_shares(codec.shares(sizes, w))) for w in WORKERS])

    # -- the driver ----------------------------------------------------------------------------------------------------

    def driver(self) -> None:
        """Measure the driver's work with heartbeats, decisions and the ledger."""
        self.read("monitor, each second: a beat of each rank", lambda w: heard(w)[1])
        self.read("driver, each second: beats fetched and judged", judged)
        self.read("driver, twice a minute: slow ranks", stragglers)
        self.read("driver, each second: nodes to leave out, three with faults", excluded)
        self.read("ledger: 500 events written", written)
        sizes = [np.mean([len(json.dumps(event)) for event in events(w)]) for w in WORKERS]
        self.add("ledger: an event", "bytes", list(map(float, sizes)))


def seconds(run: Callable[[], Any], values: int) -> float:
    """Return the CPU time of one call: the median of values of enough calls, whatever else the machine does."""
    found = []
    run()
    for _ in range(values):
        count, began = 0, time.process_time()
        while (passed := time.process_time() - began) < LEAST_SECONDS or not count:
            run()
            count += 1
        found.append(passed / count)
    return float(np.median(found))


def once(run: Callable[[], Any]) -> float:
    """Return the CPU time of one call."""
    began = time.process_time()
    run()
    return time.process_time() - began


def gather(plan: StepPlan, order: EpochOrder, own: range, start: int, stop: int) -> tuple[np.ndarray, ...]:
    """Do what `Pipeline._gather` does for steps [start, stop) of an epoch, without reading a record."""
    b = plan.micro_batch_size
    counts = plan.counts(start)[own.start : own.stop]
    ids = np.concatenate([order.records(v, start * b, stop * b) for v in own])
    return ids, counts, step_seeds(1, np.arange(start, stop), np.array(own, np.int64), 3)


def main(arguments: Arguments) -> int:
    """Measure, and print the report."""
    report = Report("scale", "Control plane as workers grow: pure code in one process, no cluster")
    records = RECORDS // 4 if arguments.quick else RECORDS
    benchmark = Benchmark(report, min(3, arguments.pairs) if arguments.quick else arguments.pairs, records)
    benchmark.data()
    benchmark.epochs()
    benchmark.step()
    benchmark.checkpoints()
    benchmark.driver()
    head = ["CPU time in one process, and sizes", "unit", *(f"{w:,} workers" for w in WORKERS), "8 times as many"]
    report.grids.append(Grid("By the number of workers W, with V logical shards", head, benchmark.rows))
    report.notes.append(
        "A rank of torch's DistributedSampler makes the list of all records and takes its part; one of tf.data goes "
        "through all records and drops those of others. raytf permutes once and looks up what it needs; where the "
        "source is read in blocks, it permutes blocks."
    )
    return report.finish(arguments.json)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Arguments)))
