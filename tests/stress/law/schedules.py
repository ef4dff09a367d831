"""The law, tried: random schedules of resizes and kills change nothing in what is learned.

    python -m tests.stress.law.schedules --schedules 20 --exact

Each schedule trains one model on an elastic cluster of one to four nodes of this machine, on which random faults come
at random steps: workers, nodes, the driver and Ray Train's controller are killed, nodes get notice or join, workers
pause. Before them each model is trained by one worker without a fault. Then the records that each epoch of the
committed history missed or saw twice are counted (see job.py), and the weights (with --exact) or the losses are
compared. Faults with which all died that had the state are marked `!`; steps that were computed again without one
break the law, too.
"""

from __future__ import annotations

import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

import raytf
from raytf.testing import ElasticCluster, Fault, FaultPlan, Injection, Kind, Report

JOB = Path(__file__).with_name("job.py")
MODELS = ("mnist", "batchnorm")
MOST_NODES = 4
#: Losses of the first steps, before training has amplified a last bit, may differ by so much (relative).
LOSS_TOLERANCE, LOSS_STEPS = 1e-4, 50
#: Seconds of sleep in each step: a run of a hundred steps would else be over before a node has joined.
PAUSE_SECONDS = 0.3
#: Seconds within which the status file tells of a loss.
_STATUS_SECONDS = 5.0
_LEAVE = (Kind.NODE, Kind.RAYLET, Kind.DRAIN)
_KINDS = (*_LEAVE, Kind.ADD, Kind.ADD, Kind.WORKER, Kind.WORKER, Kind.DRIVER, Kind.CONTROLLER, Kind.PAUSE)


@dataclass(frozen=True)
class Arguments:
    """Try the law on random schedules of resizes and kills."""

    schedules: int = 20
    """How many."""
    first: int = 1
    """Of the schedules, to go on where an earlier command was cut off."""
    seed: int = 0
    """Of the schedules."""
    exact: bool = False
    """Train with --exact and compare weights to the last bit."""
    reduction: str = "fixed"
    """fixed or float."""
    overlap: bool = False
    """Train with --overlap; the run without faults, of one worker, has nothing to overlap."""
    data: str = "auto"
    """As in jobs/mnist.py: auto, mnist, digits, or a path of IDX files."""
    epochs: int = 4
    """Length of each run."""
    global_batch_size: int = 64
    """Of each step."""
    json: Path | None = None
    """Write all results here too."""


@dataclass(frozen=True)
class Outcome:
    """What a run left."""

    model: str
    worlds: list[int]
    redone: int
    missing: int
    twice: int
    sha256: str
    losses: np.ndarray
    report: Report


def schedule(seed: str, steps: int, nodes: int) -> FaultPlan:
    """Three faults of which each can happen, the first of them a resize.

    Args:
        seed: of the draw.
        steps: of the run.
        nodes: at the beginning.
    """
    draw = random.Random(f"schedule {seed}")
    faults: list[Fault] = []
    for tenth in (1, 3, 5):  # far enough apart that a node that joined is used before the run is over
        step = draw.randint(steps * tenth // 10, steps * (tenth + 1) // 10)
        kinds = [k for k in _KINDS if not ((k is Kind.ADD and nodes == MOST_NODES) or (k in _LEAVE and nodes == 1))]
        kind = draw.choice(kinds if faults else [k for k in kinds if k is Kind.ADD or k in _LEAVE])
        nodes += (kind is Kind.ADD) - (kind in _LEAVE)
        at_once = bool(faults) and draw.random() < 0.2
        faults.append(Fault(step, kind, draw.randrange(12), round(draw.uniform(2, 8), 1), at_once=at_once))
    return FaultPlan(faults)


def run(arguments: Arguments, model: str, name: str, plan: FaultPlan, cluster: ElasticCluster, folder: Path) -> Outcome:
    """Train once under a plan.

    Raises:
        AssertionError: the run fails or does not end.
    """
    status = folder / f"{name}.json"
    command = [sys.executable, str(JOB), "--model", model, "--data", arguments.data, "--epochs", str(arguments.epochs)]
    command += ["--global-batch-size", str(arguments.global_batch_size), "--workers", f"1:{MOST_NODES}"]
    command += ["--checkpoint-every-steps", "25", "--resize-every-seconds", "5", "--reduction", arguments.reduction]
    command += ["--pause", str(PAUSE_SECONDS if plan.faults else 0)]
    command += ["--storage", str(folder), "--run", name, "--status-file", str(status)]
    command += [*(["--exact"] if arguments.exact else []), *(["--overlap"] if arguments.overlap else [])]
    report = plan.run(command, status, folder / f"{name}.log", cluster, folder=Path.cwd(), most_nodes=MOST_NODES)
    if report.code:
        raise AssertionError(f"schedule {name} ended with exit code {report.code}:\n{report.output}")
    return _read(folder / name, model, arguments.epochs, report)


def _read(folder: Path, model: str, epochs: int, report: Report) -> Outcome:
    result = json.loads((folder / "result.json").read_text())
    attempts = [json.loads(path.read_text()) for path in sorted(folder.glob("attempts/*.json"))]
    history = result["history"]
    assert [entry["epoch"] for entry in history] == list(range(epochs)), history
    steps = raytf.read_steps(str(folder))
    assert steps["step"].tolist() == list(range(1, result["steps"] + 1)), "the history of steps has gaps"
    return Outcome(
        model,
        [attempt["world_size"] for attempt in attempts],
        redone(folder),
        round(sum(entry["seen"][0] for entry in history)),
        round(sum(entry["seen"][1] for entry in history)),
        result["weights_sha256"],
        steps["loss"],
        report,
    )


def redone(folder: Path) -> int:
    """Steps that were computed again: for each attempt those between where it began and what was computed before."""
    computed = [line.split() for line in (folder / "files" / "executed.txt").read_text().splitlines()]
    found = 0
    for path in sorted(folder.glob("attempts/*.json")):
        attempt = json.loads(path.read_text())
        reached = max((int(step) for at, step in computed if float(at) < attempt["time"]), default=0)
        found += max(0, reached - attempt["from_step"])
    return found


def agrees(outcome: Outcome, reference: Outcome, arguments: Arguments) -> bool:
    """Whether a run learned what the undisturbed one did, and computed no step again that somebody still had.

    With float sums or overlap all start again after each loss.
    """
    if outcome.missing or outcome.twice:
        return False
    repairs = arguments.reduction == "fixed" and not arguments.overlap
    if repairs and outcome.redone and not whole_losses(outcome.report.injections):
        return False
    if arguments.exact:
        return outcome.sha256 == reference.sha256 and outcome.losses.tobytes() == reference.losses.tobytes()
    return difference(outcome, reference) <= LOSS_TOLERANCE


def whole_losses(injections: Sequence[Injection]) -> list[Injection]:
    """Faults with which all died that had the state: steps may have been computed again after these alone.

    With the driver or the controller all workers end. A worker or a node is all where it was the only one, or where the
    status file did not know yet of one that had just gone.
    """
    found, gone = [], float("-inf")
    for injection in (each for each in injections if each.is_done):
        kind = injection.fault.kind
        takes_one = kind in (Kind.WORKER, *_LEAVE)
        left = (injection.workers or 0) - (injection.seconds - gone < _STATUS_SECONDS)
        if kind in (Kind.DRIVER, Kind.CONTROLLER) or (takes_one and left <= 1):
            found.append(injection)
        gone = injection.seconds if takes_one else gone
    return found


def difference(outcome: Outcome, reference: Outcome) -> float:
    """Largest relative difference of the first losses."""
    ours, theirs = outcome.losses[:LOSS_STEPS], reference.losses[:LOSS_STEPS]
    return float(np.max(np.abs(ours - theirs) / np.abs(theirs)))


def describe(name: str, outcome: Outcome, reference: Outcome) -> str:
    """A run as a few lines."""
    events, whole = [], whole_losses(outcome.report.injections)
    for injection in outcome.report.injections:
        event = f"{injection.fault.kind}@{injection.step}" + "!" * (injection in whole)
        events.append(event if injection.is_done else f"({injection.fault.kind})")
    return (
        f"{name:>12} {outcome.model:9} workers {'-'.join(map(str, outcome.worlds)):15} "
        f"redone {outcome.redone:4} missing {outcome.missing} twice {outcome.twice} "
        f"loss differs {difference(outcome, reference):.1e} sha256 {outcome.sha256[:16]} "
        f"{outcome.report.seconds:4.0f} s  {' '.join(events) or 'no faults'}"
    )


def main(arguments: Arguments) -> int:
    """Run all; the exit code."""
    began = time.monotonic()
    draw = random.Random(f"law {arguments.seed}")
    broken: list[str] = []
    outcomes: dict[str, Outcome] = {}
    reference: dict[str, Outcome] = {}
    print(" ".join(["python", *sys.argv]), flush=True)
    with tempfile.TemporaryDirectory(prefix="raytf-law-") as name, ElasticCluster(nodes=1) as cluster:
        folder = Path(name)
        for model in MODELS[: arguments.schedules]:
            reference[model] = run(arguments, model, f"alone-{model}", FaultPlan([]), cluster, folder)
            print(describe("undisturbed", reference[model], reference[model]), flush=True)
        steps = len(next(iter(reference.values())).losses)
        for number in range(arguments.schedules):
            model, wanted = MODELS[number % len(MODELS)], draw.choice((1, 1, 2, 2, 3, 4))
            if number + 1 < arguments.first:
                continue
            plan = schedule(f"{arguments.seed}/{number}", steps, wanted)
            while len(cluster.nodes) < wanted:
                cluster.add_node()
            for node in cluster.nodes[wanted:]:
                node.kill()
            key = f"schedule {number + 1}"
            outcome = outcomes[key] = run(arguments, model, f"schedule-{number + 1}", plan, cluster, folder)
            print(describe(key, outcome, reference[model]), flush=True)
            if not agrees(outcome, reference[model], arguments):
                broken.append(key)
    faults = [i for o in outcomes.values() for i in o.report.injections if i.is_done]
    worlds = sorted({world for o in outcomes.values() for world in o.worlds})
    hashes = {m: len({o.sha256 for o in [reference[m], *outcomes.values()] if o.model == m}) for m in reference}
    print(
        f"{len(outcomes)} schedules, {len(faults)} faults, {sum(len(o.worlds) for o in outcomes.values())} groups of "
        f"{', '.join(map(str, worlds))} workers, {sum(o.redone for o in outcomes.values())} steps redone, "
        f"{sum(o.missing for o in outcomes.values())} records missing, "
        f"{sum(o.twice for o in outcomes.values())} twice, "
        + ", ".join(f"{count} hash{'es' if count > 1 else ''} of {model}" for model, count in hashes.items())
        + f", {time.monotonic() - began:.0f} s"
    )
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([_document(key, o) for key, o in outcomes.items()], indent=1))
    what = "weights and losses equal to the last bit" if arguments.exact else f"losses within {LOSS_TOLERANCE:g}"
    print(f"verdict: {'BROKEN by ' + ', '.join(broken) if broken else f'the law holds ({what})'}")
    return 1 if broken else 0


def _document(key: str, outcome: Outcome) -> dict[str, Any]:
    return {
        "schedule": key,
        "model": outcome.model,
        "world_sizes": outcome.worlds,
        "steps_redone": outcome.redone,
        "records_missing": outcome.missing,
        "records_twice": outcome.twice,
        "weights_sha256": outcome.sha256,
        "seconds": outcome.report.seconds,
        "faults": [
            {"kind": i.fault.kind, "wanted_step": i.fault.step, "step": i.step, "done": i.done, "seconds": i.seconds}
            for i in outcome.report.injections
        ],
    }


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the cluster goes with this process
    sys.exit(main(tyro.cli(Arguments)))
