"""Measures what exact training costs: steps/s of the exact step against those of a float step.

    python -m benchmarks.step.exact --workers 1 2 4 --models mnist large --json cost.json
    python -m benchmarks.step.exact --workers 1 --profile         # the operations in which the difference is spent

Real processes, MultiWorkerMirroredStrategy over the network of this machine, one TensorFlow thread a worker. All
groups of workers are there all the time, set up as `raytf.training.worker` does it for each mode, and take turns in
blocks of steps (A B, B A, A B, ...). CPU time is rank 0's and varies less than the clock. `benchmarks.step.digests`
measures what digests and audits cost, with the same processes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from benchmarks.harness import PAIRS, ROOT, Comparison, Reading, Report, importable, rounds

BATCH, SHARDS = 128, 4
FLOAT, EXACT, PLAIN, AUDITED = "float", "exact", "exact without digests", "exact with audits"
#: What each is of `StepOptions`. With several workers a run has audits by default; one worker has none.
MODES = {FLOAT: {"fixed_point": False}, EXACT: {}, PLAIN: {"digests": False}, AUDITED: {"audits": True}}
#: Steps of one call, and different calls that the blocks go through again and again.
CALL, CALLS = 8, 12
#: Calls before the clock runs. Exponents find their places in the first steps, which are often done twice.
WARM = 8
#: How a block is run that is not only timed: its operations are, or each call has a step with an audit.
PROFILE, AUDIT = "profile", "audit"
#: What a worker's command begins with; its group, number, model and modes follow as JSON.
AS_RANK = "--rank"
#: As many as `raytf.training.worker` sends.
FLAGS = 9
#: Of exact against float.
GOAL = 1 / 1.15


def mnist() -> Any:
    return runpy.run_path(str(ROOT / "jobs" / "mnist.py"))["build"]((28, 28, 1), 10)


def large() -> Any:
    import keras
    from keras import layers

    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(32, 3, strides=2, padding="same", use_bias=False),
            layers.BatchNormalization(),
            layers.Activation("relu"),
            layers.Conv2D(64, 3, strides=2, padding="same", activation="relu"),
            layers.Flatten(),
            layers.Dense(768, activation="relu"),
            layers.Dense(256, activation="relu"),
            layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


MODELS = {"mnist": mnist, "large": large}


def images(records: int) -> tuple[np.ndarray, np.ndarray]:
    """Return images of ten patterns under noise, which take some steps to learn."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, records)
    patterns = rng.integers(0, 256, (10, 28, 28, 1))
    noise = rng.integers(0, 256, (records, 28, 28, 1))
    return (0.35 * patterns[labels] + 0.65 * noise).astype(np.uint8), labels


def rank_main(addresses: list[str], rank: int, name: str, modes: list[str]) -> None:
    """Do blocks of steps as the parent asks for them; an empty line ends it."""
    from raytf.distributed.membership.rendezvous import Meeting
    from raytf.training.process.process import ProcessSettings
    from raytf.training.worker import set_up

    place = Meeting(rank, tuple(addresses), bytes(32))
    set_up(place, ProcessSettings(1, exact=FLOAT not in modes))
    from raytf.distributed.multi_worker import MultiWorkerGroup

    group = MultiWorkerGroup(place)
    run = Run(name, group, modes)
    answer: dict[str, Any] = {"weights": run.weights}
    for mode in modes:
        run(mode, WARM)
    while True:
        print(json.dumps(answer), flush=True)
        wanted = sys.stdin.readline().strip()
        if not wanted:
            os._exit(0)  # freeing TensorFlow's objects takes long
        mode, calls, how = json.loads(wanted)
        before = run.sums()
        answer = {"operations": profiled(run, mode, calls)} if how == PROFILE else run(mode, calls, how == AUDIT)
        answer["repeated"] = run.sums() - before - calls * CALL


class Run:
    """A model, its step in each of some modes, and calls that are gathered beforehand."""

    def __init__(self, name: str, group: Any, modes: Sequence[str]):
        import tensorflow as tf

        from raytf.audit import shard_audit
        from raytf.checkpoint.variables import seed_states
        from raytf.config.flags import ComputeSection
        from raytf.data.pipeline import Pipeline
        from raytf.data.plan import StepPlan, assign
        from raytf.data.sources import ArraySource
        from raytf.training.model.model import build
        from raytf.training.step.step import StepOptions, TrainStep

        source = ArraySource(*images(BATCH * CALL * CALLS))
        plan = StepPlan(source.records, BATCH, SHARDS)
        own = assign(SHARDS, group.world_size)[group.rank]
        pipeline = Pipeline(source, plan, own, seed=0)
        model = build(MODELS[name], pipeline.sample(), [source], ComputeSection(), seed=0)
        pipeline.prepare(len(seed_states(model)), None)
        self.weights, self.steps = model.count_params(), 0
        self._sums = tf.Variable(0)
        template, specs = pipeline.template, pipeline.leaf_specs
        all_reduce = group.all_reduce if group.world_size > 1 else None
        self._modes = {
            mode: TrainStep(model, plan, own, all_reduce, template, specs, StepOptions(FLAGS, **MODES[mode]))
            for mode in modes
        }
        for step in self._modes.values():
            self._count(step.reductions[0])
        self.calls = [pipeline.submit(c * CALL, (c + 1) * CALL).result() for c in range(CALLS)]
        #: A call that is a step shorter, and a step with an audit as a call of its own.
        self._audited = list[Any]()
        if AUDITED in modes:
            choice = shard_audit.choose(0, CALL, assign(SHARDS, group.world_size))
            is_auditor = choice.auditor == group.rank
            last = pipeline.submit(CALL - 1, CALL, choice.shard if is_auditor else None).result()
            self._audited = [(pipeline.submit(0, CALL - 1).result(),), (last, choice.shard, is_auditor)]
        pipeline.close()

    def __call__(self, mode: str, calls: int, has_audits: bool = False) -> dict[str, Any]:
        """Return the seconds of a step by the clock, and of this process's CPU time, over some calls.

        Args:
            has_audits: whether the last step of each call has an audit.
        """
        step = self._modes[mode]
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            ordinary = [(self.calls[self.steps // CALL % CALLS],)]
            for call, *audited in self._audited if has_audits else ordinary:
                step(call, np.zeros(FLAGS, np.float32), *audited)
            self.steps += CALL
        steps = calls * CALL
        return {"wall": (time.perf_counter() - began) / steps, "cpu": (time.process_time() - cpu) / steps}

    def sums(self) -> int:
        """Return the number of times that the sums of a step were computed."""
        return int(self._sums.numpy())

    def _count(self, reduction: Any) -> None:
        reduce = reduction.reduce

        def counted(all_reduce: Any, compute: Any, *more: Any) -> Any:
            def attempt(scales: Any, early: Any) -> Any:
                self._sums.assign_add(1)
                return compute(scales, early)

            return reduce(all_reduce, attempt, *more)

        reduction.reduce = counted


def profiled(run: Run, mode: str, calls: int) -> dict[str, float]:
    """Return the milliseconds of a step in each type of operation."""
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            run(mode, calls)
        (trace,) = Path(folder).rglob("*.xplane.pb")
        space = xplane_pb2.XSpace.FromString(trace.read_bytes())
    spent: Counter[str] = Counter()
    for plane in space.planes:
        for event in (event for line in plane.lines for event in line.events):
            name = plane.event_metadata[event.metadata_id].name  # NODE:OPERATION where it is one
            if ":" in name and not any(mark in name for mark in ("::", "$", "__")):
                spent[name.split(":")[-1]] += event.duration_ps / 1e9 / (calls * CALL)
    return dict(spent)


def free_addresses(count: int) -> list[str]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    return addresses


class Workers:
    """Processes that make the steps of some modes."""

    def __init__(self, count: int, name: str, modes: Sequence[str], verbose: bool):
        addresses = free_addresses(count)
        err = None if verbose else subprocess.DEVNULL
        self._ranks = [
            subprocess.Popen(
                [sys.executable, __file__, AS_RANK, json.dumps([addresses, rank, name, modes])],
                stdin=-1,
                stdout=-1,
                stderr=err,
                text=True,
                env=importable(),
            )
            for rank in range(count)
        ]

    def answer(self) -> dict[str, Any]:
        """Rank 0's, when all have one."""
        lines = [rank.stdout.readline() for rank in self._ranks if rank.stdout]
        if not all(lines):
            raise SystemExit("a worker failed; see why with --verbose")
        return json.loads(lines[0])

    def run(self, mode: str, calls: int, how: str = "") -> dict[str, Any]:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps([mode, calls, how]) + "\n")
            rank.stdin.flush()
        return self.answer()

    def end(self) -> None:
        for rank in self._ranks:
            rank.kill()


@dataclass(frozen=True)
class Arguments:
    """Exact against float."""

    quick: bool = False
    """One worker and two, the model of jobs/mnist.py, three pairs of short blocks."""
    workers: list[int] = field(default_factory=lambda: [1, 2, 4])
    """Numbers of workers."""
    models: list[str] = field(default_factory=lambda: list(MODELS))
    """Of mnist and large."""
    pairs: int = PAIRS
    """Blocks of each mode."""
    seconds: float = 2.0
    """Length of a block."""
    profile: bool = False
    """Time the operations of a step instead."""
    verbose: bool = False
    """Show what the workers print."""
    json: Path | None = None
    """Write the report here."""


def described(name: str, weights: int, count: int) -> str:
    """Return a model and its workers in words."""
    return f"{name}, {weights:,} weights, {count} worker{'s' * (count > 1)}"


def compared(
    what: str, peer: str, ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]], goal: float
) -> list[Comparison]:
    """Return the rows of two modes, from the blocks that `Run` reports."""
    rates, cpu = ([1 / b["wall"] for b in side] for side in (ours, theirs)), "CPU ms/step of rank 0"
    spent = ([1000 * b["cpu"] for b in side] for side in (ours, theirs))
    return [
        Comparison(what, peer, "steps/s", *rates, goal=goal),
        Comparison(what, peer, cpu, *spent, more_is_better=False),
    ]


def measure(name: str, count: int, arguments: Arguments, report: Report) -> None:
    """Measure the rows of a model and a number of workers."""
    workers = {mode: Workers(count, name, [mode], arguments.verbose) for mode in (FLOAT, EXACT)}
    try:
        weights = [group.answer()["weights"] for group in workers.values()]
        calls = max(1, int(arguments.seconds / (workers[FLOAT].run(FLOAT, 2)["wall"] * CALL)))
        if arguments.profile:
            spent = {mode: group.run(mode, calls, PROFILE)["operations"] for mode, group in workers.items()}
            show_operations(name, count, spent)
            return
        blocks = rounds(arguments.pairs, {mode: partial(group.run, mode, calls) for mode, group in workers.items()})
    finally:
        for group in workers.values():
            group.end()
    what = described(name, weights[0], count)
    steps = calls * CALL * arguments.pairs
    again = sum(block["repeated"] for block in blocks[EXACT])
    report.comparisons += compared(f"{what}, exact", FLOAT, blocks[EXACT], blocks[FLOAT], GOAL)
    report.readings.append(Reading(what, "steps done twice", "%", [100 * again / steps]))


def show_operations(name: str, count: int, spent: dict[str, dict[str, float]], most: int = 20) -> None:
    before, after = spent[FLOAT], spent[EXACT]
    kinds = sorted({*before, *after}, key=lambda kind: -abs(after.get(kind, 0) - before.get(kind, 0)))[:most]
    print(f"{name}, {count} workers: ms a step, float and exact")
    for kind in kinds:
        print(f"{kind:40} {before.get(kind, 0):8.3f} {after.get(kind, 0):8.3f}", flush=True)


def main(arguments: Arguments) -> int:
    workers, models = arguments.workers, arguments.models
    if arguments.quick:
        workers, models = [1, 2], ["mnist"]
        arguments = dataclasses.replace(arguments, pairs=3, seconds=1.0)
    report = Report("exact_cost", "Exact against float")
    for count in workers:
        for name in models:
            measure(name, count, arguments, report)
    if arguments.profile:
        return 0
    report.notes.append(f"Batch {BATCH}, {SHARDS} logical shards, one thread within operations, calls of {CALL} steps.")
    return report.finish(arguments.json)


if __name__ == "__main__":
    if sys.argv[1:2] == [AS_RANK]:
        rank_main(*json.loads(sys.argv[2]))
    raise SystemExit(main(tyro.cli(Arguments)))
