"""Recomputes steps with the run's own program, in another folder, and compares them with the run's records."""

from __future__ import annotations

import json
import math
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from raytf.checkpoint import durable, manifest, naming
from raytf.config.terminal_text import say, visible
from raytf.config.train_config import TrainConfig
from raytf.distributed import step_digest
from raytf.distributed.step_digest import Difference, DigestKind, DigestLayout
from raytf.errors import CheckpointError, ConfigError, RaytfError, StorageError
from raytf.runs import digest_log, run_log, start_command
from raytf.runs.digest_log import RunDigests
from raytf.storage.storage import Storage

#: The folder with the files from which callbacks continue.
_OF_CALLBACKS = "files"
#: Prefixes of the tensors that a replay compares. It ignores, for example, the tensors of callbacks and metrics.
_COMPUTED = ("model/", "optimizer/", "reduction/")
#: Environment variable in which `raytf replay` passes its plan to `fit`; the program need not know about it.
VARIABLE = "RAYTF_REPLAY"
#: Name of the run that recomputes steps.
RUN = "replay"
#: Settings that a replay turns off, because they do not affect the values of its steps.
_WITHOUT: dict[str, Any] = {
    "track": None,
    "keep_best": None,
    "status_file": None,
    "histograms_every": 0,
    "warm_workers": False,
}


def words_of(run: Storage, program: str, usage: str) -> list[str]:
    """Return the words of the user's training command, with `python` replaced by this interpreter.

    Args:
        run: the folder of the run, whose recorded command is shown but never run.
        program: the command, as one text for a shell.
        usage: the user's own command up to `--`.
    """
    if not program:
        raise ConfigError(_no_program(run, usage))
    try:
        words = shlex.split(program)
    except ValueError as error:
        raise ConfigError(f"the command {visible(program)} cannot be parsed: {error}.") from None
    return [sys.executable, *words[1:]] if words[:1] in (["python"], ["python3"]) else words


def _no_program(run: Storage, usage: str) -> str:
    try:
        command = start_command.read(run)
    except (RaytfError, StorageError):
        command = None
    recorded = "The run's folder does not record which command started it."
    if command is not None and command.words:
        recorded = (
            f"The run's folder records this command, started in {visible(command.folder)}; check it before you pass "
            f"it: {start_command.text(command)}"
        )
    return (
        "recomputing steps runs the program that trained the run, but never a command from the run's folder. "
        f"Pass the command after `--`: {usage} -- python train.py. {recorded}"
    )


def seed_before(run: Storage, folder: str, step: int) -> int:
    """Make the replay in a folder start from the newest complete checkpoint before a step; return its step, or 0."""
    for name in manifest.list_complete(run):
        if naming.split_name(name)[0] < step and seed(run, folder, name):
            return naming.split_name(name)[0]
    return 0


def seed(run: Storage, folder: str, name: str) -> bool:
    """Make the replay in a folder start from a checkpoint. Return False if it is damaged, or was just deleted."""
    again = Storage(folder).child(RUN)
    place = f"{manifest.FOLDER}/{name}"
    try:
        manifest.read(run, name)
        os.makedirs(os.path.join(again.root, place))
        run.get_tree(place, os.path.join(again.root, place))
    except (RaytfError, StorageError):
        again.delete(place)
        return False
    if run.list(_OF_CALLBACKS):
        run.get_tree(_OF_CALLBACKS, os.path.join(again.root, _OF_CALLBACKS))
    return True


def compute(words: list[str], plan: ReplayPlan) -> Storage:
    """Run the program, and return the folder of the replay."""
    say(f"running {shlex.join(['python' if word == sys.executable else word for word in words])}")
    # Run on this machine, where the folders are, even if the shell selects a cluster.
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    try:
        done = subprocess.run(words, env={**environment, **plan.environment()}, check=False)
    except OSError as error:
        raise ConfigError(f"{visible(words[0])} cannot be run: {error.strerror or error}.") from None
    again = Storage(plan.folder).child(RUN)
    if not again.exists(run_log.RESULT):
        raise ConfigError(
            f"the program did not compute the steps (exit code {done.returncode}): {visible(shlex.join(words))}. Read "
            "its output; if that shows no error, the program did not call fit for this run."
        )
    return again


def not_computed(run: Storage, again: Storage, step: int, name: str | None = None) -> str:
    """Return how a checkpoint of `run` (default: any of the step) differs from the one of the same step in `again`.

    Empty if both are equal, or `run` has no such checkpoint.
    """
    name = name or _at(run, step)
    if name is None:
        return ""
    ended = _at(again, step)
    if ended is None:
        return f"the program did not reach step {step}"
    try:
        ours, theirs = (durable.load(*each).tensors for each in ((again, ended), (run, name)))
    except (CheckpointError, StorageError) as error:
        return f"checkpoint {name} cannot be compared: {error}"
    names = sorted(key for key in ours.keys() | theirs.keys() if key.startswith(_COMPUTED))
    wrong = [key for key in names if _bits(ours.get(key)) != _bits(theirs.get(key))]
    return f"checkpoint {name} differs from the recomputed one in {', '.join(wrong[:5])}" if wrong else ""


def _at(run: Storage, step: int) -> str | None:
    return next((name for name in manifest.list_complete(run) if naming.split_name(name)[0] == step), None)


def _bits(array: np.ndarray | None) -> Any:
    return None if array is None else (array.dtype, array.shape, array.tobytes())


# -- replaying ---------------------------------------------------------------------------------------------------------
#
# The program is the run's own. Its call of `fit` for that run trains in another folder, from a copy of a checkpoint up
# to the requested step, and then exits: the code after that call belongs to the run, not to the replay.


class StepsComputed(SystemExit):
    """Raised by `fit` in a program that `raytf replay` or `raytf prove` started, once the steps are computed."""


@dataclass(frozen=True)
class ReplayPlan:
    """The steps to recompute.

    Attributes:
        run: URI of the run's folder.
        step: the last step.
        workers: number of workers.
        folder: the storage of the replay, which is the run `RUN` there.
        dump: the folder to write the values of the step to; empty to write none.
    """

    run: str
    step: int
    workers: int
    folder: str
    dump: str = ""

    def environment(self) -> dict[str, str]:
        """Return the environment variables that pass this plan to the program."""
        return {VARIABLE: json.dumps(asdict(self))}


def requested(config: TrainConfig, environment: Mapping[str, str] = os.environ) -> ReplayPlan | None:
    """Return the plan by which this process recomputes steps of the configured run; None if it trains the run."""
    plan = _plan(environment)
    if plan is None:
        return None
    run = Storage(config.storage_uri).child(config.run.name)
    return plan if run.locate("") == Storage(plan.run).locate("") else None


def is_requested(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process was started to recompute steps of a run."""
    return bool(environment.get(VARIABLE))


def with_room(config: TrainConfig, environment: Mapping[str, str] = os.environ) -> TrainConfig:
    """Return the settings with which a program starts Ray for all its runs, with enough workers for a replay."""
    plan = _plan(environment)
    if plan is None or config.strategy.strategy != "multi-worker-mirrored":
        return config
    return config.replace(workers=str(plan.workers))


def _plan(environment: Mapping[str, str]) -> ReplayPlan | None:
    text = environment.get(VARIABLE)
    return ReplayPlan(**json.loads(text)) if text else None


def check_other_run(run: Storage, environment: Mapping[str, str] = os.environ) -> None:
    """Raise if a program that recomputes steps is about to train an unfinished run other than the requested one."""
    if is_requested(environment) and not run.exists(run_log.RESULT):
        raise ConfigError(
            f"the program trains {run.locate('')}, which has not finished, before the run to recompute. Pass "
            "a command after `--` that trains only the run to recompute, with its --storage and --run."
        )


def replay_settings(plan: ReplayPlan, config: TrainConfig) -> TrainConfig:
    """Return the settings for recomputing steps: the same arithmetic, in another folder."""
    if config.strategy.strategy == "parameter-server":
        raise ConfigError(
            "steps of parameter servers depend on which worker is first, so they cannot be recomputed. Use "
            "`raytf bisect` to compare the losses of two runs."
        )
    changed = {name: value for name, value in _WITHOUT.items() if name in config.settings}
    if config.strategy.strategy == "multi-worker-mirrored":
        changed["workers"] = str(plan.workers)
    return config.replace(storage=plan.folder, run=RUN, **changed)


@dataclass(frozen=True)
class NotedSteps:
    """The digests that a run has recorded, and the losses of all steps, by step from 1."""

    digests: RunDigests
    losses: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepComparison:
    """The result of a comparison.

    Attributes:
        same: number of steps with equal digests before the first step that differs.
        unknown: number of steps whose digests are missing on one side, or cannot be compared.
        differs: the first step that differs; None if all are equal.
        difference: the difference at that step.
        why: why digests cannot be compared, for people; empty if all could be compared.
        losses: how many of the unknown steps have a loss on both sides.
        farthest: the step among the unknown steps whose losses differ most, with both losses; None if all are equal.
    """

    same: int
    unknown: int
    differs: int | None = None
    difference: Difference | None = None
    why: str = ""
    losses: int = 0
    farthest: tuple[int, float, float] | None = None

    @property
    def is_same(self) -> bool:
        """Return whether something was compared, and nothing differs."""
        return self.differs is None and self.farthest is None and bool(self.same or self.losses)


def read_noted(run: Storage) -> NotedSteps:
    """Read the digests and losses that a run has recorded."""
    table = run_log.read_steps(run.uri)
    losses = dict(zip(table["step"].tolist(), table["loss"].tolist(), strict=True))
    return NotedSteps(digest_log.read(run, run_log.STEPS), losses)


def compare_steps(noted: NotedSteps, again: NotedSteps, steps: range) -> StepComparison:
    """Compare recorded and recomputed digests up to the first difference. Compare the losses of steps without them."""
    same, unknown, why = 0, list[int](), ""
    differs, difference = None, None
    for step in steps:
        before, after = noted.digests.of(step), again.digests.of(step)
        if before is None or after is None:
            unknown.append(step)
            why = why or f"step {step} has no digest"
        elif before[0] != after[0]:
            unknown.append(step)
            why = why or _unlike(before[0], after[0])
        else:
            difference = step_digest.difference(before[0], before[1], after[1])
            if difference is not None:
                differs = step
                break
            same += 1
    both = [step for step in unknown if step in noted.losses and step in again.losses]
    pairs = [(step, noted.losses[step], again.losses[step]) for step in both]
    farthest = max(pairs, key=_apart, default=None)
    if farthest is not None and not _apart(farthest):
        farthest = None
    return StepComparison(same, len(unknown), differs, difference, why, len(both), farthest)


def _apart(pair: tuple[int, float, float]) -> float:
    """Return how far two losses of a step are apart, relative to the larger one."""
    _, one, other = pair
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


def _unlike(noted: DigestLayout, again: DigestLayout) -> str:
    if noted.kind != again.kind and DigestKind.DEVICE not in (noted.kind, again.kind):
        return "an older raytf computed the digests of one of the two in another way"
    if noted.kind != again.kind:
        run, here = ("on GPUs", "on CPUs") if noted.kind == DigestKind.DEVICE else ("on CPUs", "on GPUs")
        return f"the run computed {run} and this machine computes {here}, so the last bits differ"
    if noted.shards != again.shards:
        return f"the run has {noted.shards} logical shards, but the program requests {again.shards}"
    added, gone = set(again.tensors) - set(noted.tensors), set(noted.tensors) - set(again.tensors)
    named = ", ".join(sorted(added or gone)[:3]) or "their order"
    return f"the model has other weights than the run's model: {named}"
