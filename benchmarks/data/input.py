"""Records per second that reach the training step: arrays, Parquet and TFRecord, on local disk and on S3.

    python -m benchmarks.data.input                  # five pairs of two seconds each
    python -m benchmarks.data.input --quick

Records of MNIST's size, shuffled, batches of 128, one worker. raytf's come as a training step gets them: calls of eight
steps from the pipeline, two asked for ahead, then as tensors. The peers are tf.data written by hand and Ray Data
(benchmarks/peers/input_tf_data.py and input_ray_data.py). All programs have the same cores, one reads at a time, and
each epoch reads the data again: nobody keeps more than a shuffle buffer, but for arrays, which are in memory.

S3 is moto's server in a process of its own on this machine. It answers a few hundred requests a second at best and
takes its CPU time from those that read: it bounds all of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import os
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from benchmarks import harness
from benchmarks.data import records as input_data
from benchmarks.data.records import BATCH
from benchmarks.turns import Conductor, follow

#: Steps of a call, and calls that are asked for ahead, as in raytf.training.synchronous.
CALL, AHEAD = 8, 2
PEERS = {"tf.data by hand": "input_tf_data", "Ray Data": "input_ray_data"}
GOALS = {"arrays": 100_000.0, "Parquet": 50_000.0}
_KINDS = {"arrays": "arrays", "Parquet": "parquet", "TFRecord": "tfrecord"}


@dataclass(frozen=True)
class Arguments:
    """Records per second that reach the training step."""

    quick: bool = False
    """Two pairs of half a second, without TFRecord, of which Ray Data reads few a second."""
    pairs: int = harness.PAIRS
    seconds: float = 2.0
    """Length of a block, about."""
    records: int = 60_000
    json: Path | None = None
    """Write the report here."""
    serve: str | None = None
    """What this program calls itself with: be raytf's side, for who asks at this address."""


def batches(kind: str, place: str) -> Iterator[int]:
    """Yield the steps of each call, once its records are tensors."""
    import numpy as np
    import tensorflow as tf

    from raytf.data import ArraySource, ParquetSource, TFRecordSource
    from raytf.data.pipeline import CallBatch, Pipeline
    from raytf.data.plan import StepPlan

    source: Any
    if kind == "arrays":
        source = ArraySource(np.load(f"{place}/x.npy"), np.load(f"{place}/y.npy"))
    elif kind == "parquet":
        source = ParquetSource(place)
    else:
        # From S3 `auto` would keep data as small as these in memory.
        source = TFRecordSource(place, order="auto" if "://" not in place else "blocks")
    # One shard: with more of them, what raytf holds to shuffle within would be most of these data.
    plan = StepPlan(source.records, BATCH, 1)
    pipeline = Pipeline(source, plan, range(1), seed=1)
    pipeline.prepare(1, 10)
    pending: deque[Future[CallBatch]] = deque()
    asked = 0
    while True:
        while len(pending) < AHEAD:
            end = plan.call_end(asked, CALL, sys.maxsize)
            pending.append(pipeline.submit(asked, end))
            asked = end
        call = pending.popleft().result()
        for leaf in (*call.leaves, call.seeds):
            tf.convert_to_tensor(leaf)
        yield call.stop - call.start


def deliver(address: str, steps_of: Callable[[str, str], Iterator[int]]) -> None:
    """Deliver steps as they are asked for, of one form of the data after the other.

    Args:
        steps_of: of a kind and a place, how many steps each delivery has.
    """
    now, delivered, surplus = ("", ""), iter(()), 0
    for steps, answer in follow(address, 0):
        if now != (answer["kind"], answer["place"]):
            getattr(delivered, "close", int)()
            now, surplus = (answer["kind"], answer["place"]), 0
            delivered = steps_of(*now)
        began, done = os.times(), surplus
        while done < steps:
            done += next(delivered)
        surplus, ended = done - steps, os.times()
        answer["cpu"] = ended.user + ended.system - began.user - began.system


def command(program: str) -> list[str]:
    if program == "raytf":
        return [sys.executable, __file__, "--serve", "{address}"]
    return [sys.executable, str(harness.HERE / "peers" / f"{PEERS[program]}.py"), "{address}"]


def compare(
    report: harness.Report, what: str, place: str, arguments: Arguments, programs: dict[str, Conductor]
) -> None:
    """Add the rows of one form of the data."""
    name = what.partition(",")[0]
    kind = _KINDS[name]
    told = {"kind": kind, "place": place}
    blocks: dict[str, int] = {}
    for program, running in programs.items():
        if place.startswith("s3:") and kind == "tfrecord" and program == "tf.data by hand":
            continue  # TensorFlow's wheel has no file system for s3://
        running.run(8, **told)  # the first ones open files, start threads and fill buffers
        blocks[program] = min(4096, max(8, round(running.rate(16, **told) * arguments.seconds)))
        print(f"{what}: {program} is ready, {time.time() - report.began:.0f} s", file=sys.stderr, flush=True)
    runs = {p: functools.partial(_rate, programs[p], blocks[p], told) for p in blocks}
    rates = harness.rounds(arguments.pairs, runs)
    for peer in blocks:
        if peer != "raytf":
            report.comparisons.append(harness.Comparison(what, peer, "records/s", rates["raytf"], rates[peer]))
    goal = None if what.endswith("S3") else GOALS.get(name)
    report.readings.append(harness.Reading(what, "raytf", "records/s", rates["raytf"], at_least=goal))
    cpu = programs["raytf"].run(blocks["raytf"], **told)["cpu"]
    per_second = blocks["raytf"] * BATCH / max(1e-2, cpu)
    report.readings.append(harness.Reading(what, "raytf", "records per CPU second", [per_second]))


def _rate(program: Conductor, steps: int, told: dict[str, str]) -> float:
    return program.rate(steps, **told) * BATCH


def main(arguments: Arguments) -> int:
    """Measure and print the tables."""
    if arguments.quick:
        arguments = Arguments(True, 2, 0.5, min(arguments.records, 30_000), arguments.json)
    report = harness.Report("input", "3. Input: records per second that reach the step, 28x28 uint8, batches of 128")
    with tempfile.TemporaryDirectory(prefix="raytf-input-") as name, contextlib.ExitStack() as stack:
        folder, logs = Path(name) / "data", Path(name)
        folder.mkdir()
        os.environ.update(input_data.CREDENTIALS)
        programs = {p: stack.enter_context(Conductor(p, command(p), 1, logs / f"{p}.log")) for p in ["raytf", *PEERS]}
        input_data.make(folder, arguments.records)
        compare(report, "arrays", str(folder), arguments, programs)
        files = list(_KINDS.items())[1 : 2 if arguments.quick else None]
        for what, kind in files:
            compare(report, f"{what}, local", str(folder / kind), arguments, programs)
        if any(importlib.util.find_spec(package) is None for package in ("moto", "flask")):
            report.notes.append("S3: skipped, moto[server] is not installed")
        else:
            uri = stack.enter_context(input_data.s3(folder))
            for what, kind in files:
                compare(report, f"{what}, S3", uri.format(kind), arguments, programs)
            report.notes.append("S3 is moto's server on this machine: its speed bounds all that read from it")
            if not arguments.quick:
                report.notes.append("TFRecord, S3: TensorFlow's wheel has no file system for s3://, so no tf.data")
    return report.finish(arguments.json)


if __name__ == "__main__":
    given = tyro.cli(Arguments)
    if given.serve is not None:
        deliver(given.serve, batches)
        os._exit(0)  # threads that read ahead hold nothing that is worth waiting for
    sys.exit(main(given))
