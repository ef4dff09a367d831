"""A trial: the job's own command in its own process, its reports to Ray Tune, and its end.

The trial's actor reserves no CPU. The run places either all of its workers or none, so a trial that does not fit beside
the others waits and holds no resources. The actor is pinned to the machine of `raytf tune`, where the job's file is.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray import tune

from raytf.config.command_line import EXIT_AGAIN
from raytf.config.objective import MetricObjective, flat
from raytf.errors import StorageError, one_line
from raytf.runs import run_log
from raytf.runs.status import number_text
from raytf.storage.storage import Storage
from raytf.tune import search_record
from raytf.tune.search_record import TrialOutcome, TrialRecord, run_name
from raytf.tune.table import LiveTable, TrialTable, change_text, epochs_text

#: The most seconds between two reports of a trial to Ray Tune, which can stop it only between reports.
_WORD_SECONDS = 1.0
_POLL_SECONDS = 0.1
#: Seconds that a command has to save after SIGTERM.
_SAVE_SECONDS = 130.0
#: Seconds before a restart of a command that may succeed later (exit code 75) or was killed; the most restarts without
#: a new epoch, after exit code 75 and after a kill.
_AGAIN_SECONDS, _AGAIN_TIMES = 3.0, 20
_KILLED_TIMES = 3
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class SearchPlan:
    """The settings that all trials share.

    Attributes:
        command: the job's command, with the flags that are not searched.
        folder: the working directory of the command.
        points: for each trial, the searched flags with its values, as arguments of the command.
        uri: the search's folder.
        environment: environment variables of the command in addition to the actor's.
        over: trials that ended in an earlier command, by number.
    """

    command: list[str]
    folder: str
    points: list[list[str]]
    uri: str
    goal: MetricObjective
    address: str
    environment: dict[str, str]
    over: dict[int, TrialRecord] = field(default_factory=dict)


class TrialRun(tune.Trainable):
    """Ray Tune's view of one trial.

    The result of an epoch has `epoch`, and either `score` or, if the metric is missing, `known`: the names of the other
    metrics. The last result has `outcome`, and `why` if the trial failed.
    """

    def setup(self, config: dict[str, Any], plan: SearchPlan | None = None) -> None:
        assert plan is not None  # Ray Tune passes it
        self._plan, self._number = plan, int(config["trial"])
        self._epochs: deque[dict[str, Any]] = deque()
        self._seen = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = self._again = 0
        self._step = 0
        self._ready_at = 0.0
        self._end: dict[str, Any] | None = None
        before = plan.over.get(self._number)
        if before is not None:
            self._epochs.extend(before.history)
            score = {} if before.value is None else {"score": before.value}
            ending = {"outcome": before.outcome.value, "why": before.why, "metrics": before.metrics}
            self._end = {**ending, **score, "epoch": before.epochs}
            return
        search = Storage(plan.uri)
        self._run = search.child(run_name(self._number))
        self._folder = Path(self.logdir)
        self._log, self._status = self._folder / "job.log", self._folder / "status.json"
        self._log.write_bytes(b"")
        self._start()

    def step(self) -> dict[str, Any]:
        """Return the next result: an epoch, the trial's end, or else only its progress."""
        deadline = time.monotonic() + _WORD_SECONDS
        while True:
            if self._process is not None:
                self._read_status()
                self._check_process()
            if self._epochs:
                return self._word(self._epochs.popleft())
            if self._end is not None:
                return self._word({**self._end, "done": True})
            if time.monotonic() >= deadline:
                return self._word({})
            time.sleep(_POLL_SECONDS)

    def cleanup(self) -> None:
        """Stop the command, which saves first; called when the scheduler or the user stops the trial."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.terminate()
            try:
                process.wait(_SAVE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if process is not None:
            self._settle()

    def save_checkpoint(self, checkpoint_dir: str) -> None:
        """Do nothing: the run has its own checkpoints."""

    def load_checkpoint(self, checkpoint: Any) -> None:
        """Do nothing: the run has its own checkpoints."""

    def _word(self, fields: dict[str, Any]) -> dict[str, Any]:
        return {"trial": self._number, "step": self._step, **fields}

    def _start(self) -> None:
        name = self._run.locate("").rstrip("/").rpartition("/")[2]
        own = ["--run", name, "--storage", self._plan.uri, "--status-file", str(self._status)]
        environment = {k: v for k, v in os.environ.items() if not _is_rays(k)}
        environment |= {**self._plan.environment, "RAY_ADDRESS": self._plan.address, "PYTHONUNBUFFERED": "1"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [*self._plan.command, *self._plan.points[self._number], *own],
                cwd=self._plan.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C must reach only `raytf tune`, which stops its trials
                preexec_fn=_end_with_parent,
            )

    def _check_process(self) -> None:
        assert self._process is not None
        code = self._process.poll()
        if code is None or time.monotonic() < self._ready_at:
            return
        if code == 0:
            self._settle()
            self._finish()
        elif (code == EXIT_AGAIN and self._again < _AGAIN_TIMES) or (code < 0 and self._killed < _KILLED_TIMES):
            if not self._ready_at:
                self._ready_at = time.monotonic() + _AGAIN_SECONDS
                self._again, self._killed = self._again + (code > 0), self._killed + (code < 0)
                return
            self._ready_at = 0.0
            self._settle()
            self._start()
        else:
            self._settle()
            self._fail(reason(self._log.read_text(errors="replace"), code))

    def _read_status(self) -> None:
        with contextlib.suppress(OSError, ValueError, KeyError):
            status = json.loads(self._status.read_text())
            self._step = max(self._step, status["step"])
            self._hear(status["history"])

    def _hear(self, history: list[dict[str, Any]]) -> None:
        for logs in history:
            epoch, value = int(logs["epoch"]) + 1, self._plan.goal.value(logs)
            if epoch > self._seen:
                self._seen, self._again, self._killed = epoch, 0, 0
                lacks = {"known": ", ".join(sorted(set(flat(logs)) - {"epoch", "step"}))}
                self._epochs.append({"epoch": epoch, **(lacks if value is None else {"score": value})})

    def _finish(self) -> None:
        try:
            result = run_log.read_result(self._run)
        except StorageError as error:
            return self._fail(f"its result cannot be read: {error}")
        if result is None:
            return self._fail("its command exited without a result. The job must train with one call to raytf.fit")
        self._hear(result["history"])
        self._step = result["steps"]
        metrics, goal = result["metrics"], self._plan.goal
        value = goal.value(metrics)
        if value is None:
            known = ", ".join(sorted(metrics)) or "none"
            return self._fail(
                f"its result has no finite number for {goal.metric}. Its metrics: {known}. Choose another --metric"
                + (", or make the job validate" if goal.metric.startswith("val_") else "")
            )
        self._end = {"outcome": TrialOutcome.FINISHED.value, "score": value, "epoch": self._seen, "metrics": metrics}

    def _fail(self, why: str) -> None:
        self._end = {"outcome": TrialOutcome.FAILED.value, "why": why, "epoch": self._seen}

    def _settle(self) -> None:
        """Store the output of the command, and cancel the resource request of its run."""
        self._process = None if self._process is None or self._process.poll() is not None else self._process
        with contextlib.suppress(StorageError, OSError):
            self._run.put("job.log", self._log.read_bytes())
        forget_reservation(self._run.uri)


def reason(output: str, code: int) -> str:
    """Return why a command failed, according to its output."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors:
        return errors[-1]
    what = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    return f"{what}: {lines[-1][:300]}" if lines else what


def forget_reservation(run_uri: str) -> None:
    """Cancel a run's resource request, which Ray would keep for three minutes after the command was killed."""
    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        coordinator = ray.get_actor("AutoscalingCoordinator", namespace="AutoscalingCoordinator")
        ray.get(coordinator.cancel_request.remote(requester_id=f"train-raytf {run_uri}"), timeout=10)


def _is_rays(name: str) -> bool:
    """Return whether a variable is for Ray processes: a command that inherits it would be taken for one of them."""
    own = ("RAY_JOB_ID", "RAY_RAYLET_PID", "RAY_NODE_ID", "RAY_WORKER", "RAY_CLIENT", "TUNE_", "RAY_TRAIN_")
    return name.startswith(own) or name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")


def _end_with_parent() -> None:
    # The actor dies with `raytf tune`, and the trial's command must then save and exit, too.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class EventStopper(tune.Stopper):
    """Stops a search when an event is set. Ray Tune then stops all trials, which save first."""

    def __init__(self, stop: threading.Event):
        self._stop = stop

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._stop.is_set()

    def __reduce__(self) -> Any:
        return (threading.Event, ())  # Ray Tune pickles it to restore a search, which raytf never does


class Watcher(tune.Callback):
    """Updates the table and the storage as Ray Tune's trials change.

    A trial that `stop` interrupts is not recorded, so that the next command continues it.
    """

    def __init__(
        self,
        folder: Storage,
        points: list[dict[str, Any]],
        over: dict[int, TrialRecord],
        board: TrialTable,
        view: LiveTable,
        stop: threading.Event,
    ):
        self._folder, self._points, self._over = folder, points, over
        self._board, self._view, self._stop = board, view, stop
        self._histories: dict[int, list[dict[str, float]]] = {}
        self._has_warned = False

    def __reduce__(self) -> Any:
        return (tune.Callback, ())  # as for `EventStopper`

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        number = trial.config["trial"]
        row = self._board.rows[number]
        if number not in self._over and row.state == "waiting":
            row.state = "running"
            self._view.say(change_text(number, row, self._board.goal))
        self._view.show()

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        number = trial.config["trial"]
        if number in self._over:
            return
        row = self._board.rows[number]
        row.step = result["step"]
        if "epoch" in result and "outcome" not in result and result["epoch"] > row.epoch:
            self._warn_of_missing_metric(number, result)
            row.epoch, row.value = result["epoch"], result.get("score")
            known = {k: result[k] for k in ("epoch", "score") if k in result}
            self._histories.setdefault(number, []).append(known)
        self._view.show()

    def _warn_of_missing_metric(self, number: int, result: dict[str, Any]) -> None:
        """Warn once, early in the search, if a trial lacks the metric: such a trial will fail in the end."""
        metric = self._board.goal.metric
        if "known" in result and not self._has_warned and not metric.startswith("test_"):
            self._has_warned = True
            name, known = search_record.run_name(number), result["known"]
            self._view.say(
                f"note: epoch {result['epoch']} of {name} has no {metric}. Its metrics: {known}. "
                "Choose another --metric"
            )

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        number, last = trial.config["trial"], trial.last_result
        if number in self._over or (self._stop.is_set() and "outcome" not in last):
            return
        row, metric = self._board.rows[number], self._board.goal.metric
        if "outcome" in last:
            outcome, value, why = TrialOutcome(last["outcome"]), last.get("score"), last.get("why", "")
        else:
            outcome, value = TrialOutcome.STOPPED, row.value
            why = f"others had a better {metric} than {number_text(value)} after {epochs_text(row.epoch)}"
        self._settle(number, outcome, value, why, last.get("metrics", {}))

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        why = f"its Ray actor died repeatedly: {one_line(trial.get_error(), 200)}"
        self._settle(trial.config["trial"], TrialOutcome.FAILED, None, why, {})

    def _settle(
        self, number: int, outcome: TrialOutcome, value: float | None, why: str, metrics: dict[str, float]
    ) -> None:
        epochs, history = self._board.rows[number].epoch, self._histories.get(number, [])
        record = TrialRecord(number, self._points[number], outcome, value, epochs, why, history, metrics)
        self._board.settle(record)
        search_record.write(self._folder, record)
        self._view.say(change_text(number, self._board.rows[number], self._board.goal))
        self._view.show()
