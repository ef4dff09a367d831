"""What Ray Tune tells of trials reaches the board and, when they are over, the search's storage; and when to stop."""

from __future__ import annotations

import threading
from typing import Any

from ray import tune

from raytf.errors import one_line
from raytf.runs.status import number_text
from raytf.storage.storage import Storage
from raytf.tune import search_record
from raytf.tune.search_record import TrialOutcome, TrialRecord
from raytf.tune.table import LiveTable, TrialTable, epochs_text, told


class StopWhenTold(tune.Stopper):
    """Ends a search when an event is set: Ray Tune then stops all trials, which save."""

    def __init__(self, stop: threading.Event):
        self._stop = stop

    def __call__(self, trial_id: str, result: dict[str, Any]) -> bool:
        return False

    def stop_all(self) -> bool:
        return self._stop.is_set()

    def __reduce__(self) -> Any:
        return (threading.Event, ())  # Ray Tune pickles it to be restored, which nobody does


class Watcher(tune.Callback):
    """Keeps board and storage.

    Args:
        folder: of the search.
        points: values of the searched flags, by trial.
        over: trials that were over before.
        stop: set once the search was told to stop; trials that end then are not over.
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
        self._has_told = False

    def __reduce__(self) -> Any:
        return (tune.Callback, ())  # as above

    def on_trial_start(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        number = trial.config["trial"]
        row = self._board.rows[number]
        if number not in self._over and row.state == "waiting":
            row.state = "running"
            self._view.say(told(number, row, self._board.goal))
        self._view.show()

    def on_trial_result(self, iteration: int, trials: Any, trial: Any, result: Any, **info: Any) -> None:
        number = trial.config["trial"]
        if number in self._over:
            return
        row = self._board.rows[number]
        row.step = result["step"]
        if "epoch" in result and "outcome" not in result and result["epoch"] > row.epoch:
            self._tell_what_lacks(number, result)
            row.epoch, row.value = result["epoch"], result.get("score")
            known = {k: result[k] for k in ("epoch", "score") if k in result}
            self._histories.setdefault(number, []).append(known)
        self._view.show()

    def _tell_what_lacks(self, number: int, result: dict[str, Any]) -> None:
        """Once, and while most of the search is still to come: a trial without the metric is a failed one."""
        metric = self._board.goal.metric
        if "known" in result and not self._has_told and not metric.startswith("test_"):
            self._has_told = True
            name, known = search_record.run_name(number), result["known"]
            self._view.say(f"note: epoch {result['epoch']} of {name} has no {metric}, but {known}; see --metric")

    def on_trial_complete(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        number, last = trial.config["trial"], trial.last_result
        if number in self._over or (self._stop.is_set() and "outcome" not in last):
            return
        row, metric = self._board.rows[number], self._board.goal.metric
        if "outcome" in last:
            outcome, value, why = TrialOutcome(last["outcome"]), last.get("score"), last.get("why", "")
        else:
            outcome, value = TrialOutcome.STOPPED, row.value
            why = f"others were better after {epochs_text(row.epoch)} than {metric} {number_text(value)}"
        self._settle(number, outcome, value, why, last.get("metrics", {}))

    def on_trial_error(self, iteration: int, trials: Any, trial: Any, **info: Any) -> None:
        why = f"its process at Ray died again and again: {one_line(trial.get_error(), 200)}"
        self._settle(trial.config["trial"], TrialOutcome.FAILED, None, why, {})

    def _settle(
        self, number: int, outcome: TrialOutcome, value: float | None, why: str, metrics: dict[str, float]
    ) -> None:
        epochs, history = self._board.rows[number].epoch, self._histories.get(number, [])
        record = TrialRecord(number, self._points[number], outcome, value, epochs, why, history, metrics)
        self._board.settle(record)
        search_record.write(self._folder, record)
        self._view.say(told(number, self._board.rows[number], self._board.goal))
        self._view.show()
