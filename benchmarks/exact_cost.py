"""What exact training costs: steps/s with float and with exact reduction, side by side.

    python benchmarks/exact_cost.py --workers 1,2,4 --models mnist,large --json cost.json
    python benchmarks/exact_cost.py --workers 1 --profile          # the operations in which the difference is spent

Real processes, MultiWorkerMirroredStrategy over gRPC on this machine, one TensorFlow thread a worker. Both groups of
workers are there all the time, set up as `raytf.worker` does it for each mode, and take turns in blocks of steps (A B,
B A, A B, ...), so that what else the machine does meets both alike; a ratio is that of two neighboring blocks. CPU time
is rank 0's and varies less than the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

BATCH, SHARDS = 128, 4
MODES = {"float": False, "exact": True}
#: Steps of one call, and different calls that the blocks go through again and again.
CALL, CALLS = 8, 12
#: Calls before the clock runs. Exponents find their places in the first steps, which are often done twice.
WARM = 8
#: As many as `raytf.worker` sends.
FLAGS = 8


def mnist() -> Any:
    sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))
    from mnist import build

    return build((28, 28, 1), 10)


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
    """Pictures that can be learned but not at once: ten patterns under noise."""
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, records)
    patterns = rng.integers(0, 256, (10, 28, 28, 1))
    noise = rng.integers(0, 256, (records, 28, 28, 1))
    return (0.35 * patterns[labels] + 0.65 * noise).astype(np.uint8), labels


def rank_main(addresses: list[str], rank: int, name: str, mode: str) -> None:
    """Do blocks of steps as the parent asks for them; an empty line ends it."""
    from raytf.worker import set_up

    set_up(addresses, rank, 1, quiet=True, exact=MODES[mode])
    from raytf.strategies.multi_worker import Group

    group = Group()
    began = time.perf_counter()
    run = Run(name, group, MODES[mode])
    run(1)
    answer: dict[str, Any] = {"weights": run.weights, "first": time.perf_counter() - began}
    run(WARM - 1)
    while True:
        print(json.dumps(answer), flush=True)
        wanted = sys.stdin.readline().strip()
        if not wanted:
            os._exit(0)  # freeing TensorFlow's objects takes long
        calls, profile = json.loads(wanted)
        before = run.sums()
        answer = {"operations": profiled(run, calls)} if profile else run(calls)
        answer["repeated"] = run.sums() - before - calls * CALL


class Run:
    """A model, its step, and calls that are gathered beforehand."""

    def __init__(self, name: str, group: Any, exact: bool):
        import tensorflow as tf

        from raytf.data.order import StepPlan, assign
        from raytf.data.pipeline import Pipeline
        from raytf.data.sources import ArraySource
        from raytf.model import build, seed_states
        from raytf.sections import ComputeSection
        from raytf.step import TrainStep

        source = ArraySource(*images(BATCH * CALL * CALLS))
        plan = StepPlan(source.records, BATCH, SHARDS)
        own = assign(SHARDS, group.world_size)[group.rank]
        pipeline = Pipeline(source, plan, own, seed=0)
        model = build(MODELS[name], pipeline.sample(), [source], ComputeSection(), seed=0)
        pipeline.prepare(len(seed_states(model)), None)
        self.weights, self.steps = model.count_params(), 0
        self._sums = tf.Variable(0)

        def all_reduce(tensor: tf.Tensor) -> tf.Tensor:
            self._sums.assign_add(1)
            return group.all_reduce(tensor)

        template, specs = pipeline.template, pipeline.leaf_specs
        self.step = TrainStep(model, plan, own, all_reduce, template, specs, FLAGS, jit=False, exact=exact)
        self.calls = [pipeline.submit(c * CALL, (c + 1) * CALL).result() for c in range(CALLS)]
        pipeline.close()

    def __call__(self, calls: int) -> dict[str, Any]:
        """Seconds of a step by the clock, and of this process's CPU time, over some calls."""
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(calls):
            self.step(self.calls[self.steps // CALL % CALLS], np.zeros(FLAGS, np.float32))
            self.steps += CALL
        steps = calls * CALL
        return {"wall": (time.perf_counter() - began) / steps, "cpu": (time.process_time() - cpu) / steps}

    def sums(self) -> int:
        return int(self._sums.numpy())


def profiled(run: Run, calls: int) -> dict[str, float]:
    """Milliseconds of a step in each type of operation."""
    import tensorflow as tf
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    with tempfile.TemporaryDirectory() as folder:
        with tf.profiler.experimental.Profile(folder):
            run(calls)
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
    """The processes of one mode."""

    def __init__(self, count: int, name: str, mode: str, verbose: bool):
        group = json.dumps(free_addresses(count))
        command = [sys.executable, __file__, f"--models={name}", f"--group={group}", f"--mode={mode}"]
        err = None if verbose else subprocess.DEVNULL
        self._ranks = [
            subprocess.Popen([*command, f"--rank={r}"], stdin=-1, stdout=-1, stderr=err, text=True)
            for r in range(count)
        ]

    def answer(self) -> dict[str, Any]:
        """Rank 0's, when all have one."""
        lines = [rank.stdout.readline() for rank in self._ranks if rank.stdout]
        if not all(lines):
            raise SystemExit("a worker failed; see why with --verbose")
        return json.loads(lines[0])

    def run(self, calls: int, profile: bool = False) -> dict[str, Any]:
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(json.dumps([calls, profile]) + "\n")
            rank.stdin.flush()
        return self.answer()

    def end(self) -> None:
        for rank in self._ranks:
            rank.kill()


def measure(name: str, count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    workers = {mode: Workers(count, name, mode, arguments.verbose) for mode in MODES}
    try:
        first = {mode: group.answer() for mode, group in workers.items()}
        row: dict[str, Any] = {"model": name, "workers": count, "weights": first["exact"]["weights"]}
        row["first call seconds"] = {mode: answer["first"] for mode, answer in first.items()}
        calls = max(1, int(arguments.seconds / (workers["float"].run(2)["wall"] * CALL)))
        if arguments.profile:
            return row | {mode: group.run(calls, True)["operations"] for mode, group in workers.items()}
        blocks: dict[str, list[dict[str, Any]]] = {mode: [] for mode in MODES}
        for pair in range(arguments.pairs):
            for mode in list(MODES)[:: 1 if pair % 2 == 0 else -1]:
                blocks[mode].append(workers[mode].run(calls))
        steps = calls * CALL * arguments.pairs
        return row | blocks | {"steps": steps, "repeated": sum(block["repeated"] for block in blocks["exact"])}
    finally:
        for group in workers.values():
            group.end()


def show(row: dict[str, Any]) -> str:
    def ratio(kind: str) -> str:
        ratios = [e[kind] / f[kind] for f, e in zip(row["float"], row["exact"], strict=True)]
        return f"{statistics.median(ratios):.3f} [{min(ratios):.3f}, {max(ratios):.3f}]"

    rates = " ".join(f"{1 / statistics.median(b['wall'] for b in row[mode]):14.1f}" for mode in MODES)
    again = f"{row['repeated']} of {row['steps']}"
    return (
        f"{row['model']:6} {row['weights']:>9,} {row['workers']:8} {rates}   {ratio('wall')}   {ratio('cpu')}   {again}"
    )


def show_operations(row: dict[str, Any], most: int = 20) -> str:
    before, after = row["float"], row["exact"]
    kinds = sorted({*before, *after}, key=lambda kind: -abs(after.get(kind, 0) - before.get(kind, 0)))[:most]
    lines = [f"{kind:40} {before.get(kind, 0):8.3f} {after.get(kind, 0):8.3f}" for kind in kinds]
    return "\n".join([f"{row['model']}, {row['workers']} workers: ms a step, float and exact", *lines])


HEAD = (
    "model    weights  workers  float steps/s  exact steps/s   exact / float time     CPU time               repeated"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mnist,large", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--workers", default="1,2,4")
    parser.add_argument("--pairs", type=int, default=9, help="blocks of each mode")
    parser.add_argument("--seconds", type=float, default=1.0, help="length of a block")
    parser.add_argument("--profile", action="store_true", help="time the operations of a step instead")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--verbose", action="store_true", help="show what the workers print")
    parser.add_argument("--group", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--mode", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.group:
        rank_main(arguments.group, arguments.rank, arguments.models, arguments.mode)
    if not arguments.profile:
        print(HEAD, flush=True)
    rows = []
    for workers in map(int, arguments.workers.split(",")):
        for name in arguments.models.split(","):
            rows.append(measure(name, workers, arguments))
            print(show_operations(rows[-1]) if arguments.profile else show(rows[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
