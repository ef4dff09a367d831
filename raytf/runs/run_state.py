"""The state and progress of a run: `Run`, which every display of runs uses, and the rules that decide the state."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from raytf.config.objective import MetricObjective
from raytf.errors import ConfigError
from raytf.runs.events import INTERRUPTED
from raytf.runs.ledger import Event

#: Kinds of events that show what the workers do. The newest such event decides between RUNNING and WAITING.
_DOING = ("waiting", "group", "attempt", "phase", "progress")
_GONE = "the driver disappeared without recording its end"


class RunState(enum.StrEnum):
    """The state of a run."""

    RUNNING = "running"
    WAITING = "waiting"  # its driver is alive, but the cluster has no room for its workers
    FINISHED = "finished"
    STOPPED = "stopped"  # it was interrupted or asked to stop
    FAILED = "failed"  # it ended with an error
    KILLED = "killed"  # its driver died without recording an end, or no longer reaches the storage
    DAMAGED = "damaged"  # no driver trains it, and one of its files cannot be read


@dataclass(frozen=True)
class Run:
    """A run in a storage, or a search with its trials. `raytf runs --json` prints the fields in this order.

    Attributes:
        name: its folder, relative to the storage.
        step: completed global steps; None if unknown, and for a search.
        checkpoints: number of complete checkpoints, which are the folders with a manifest.
        metric, best, epoch, last: the metric that judges the run, its best value so far, the epoch with that value
            (from 0), and the last epoch's value; None if no epoch has ended, or no metric can judge the run.
        bytes: total size of its files.
        modified: Unix time of the last change to one of its files, by the storage's clock.
        problems: problems with its files, one line each. Only `raytf verify` reads every file.
        why: why it failed, was stopped or was killed; otherwise empty.
        total: planned global steps; None if unknown.
        saved: step of the newest checkpoint; None if there is none.
        metrics: metrics of the result, or of the last known epoch.
        trials: number of trials that a search has started; None for a run.
        epochs: logs of the completed epochs, each with `epoch` (from 0) and `step`.
        settings: settings that must not change when the run is resumed, by name.
        saves: steps of the checkpoints, in order.
    """

    name: str
    state: RunState
    step: int | None = None
    checkpoints: int = 0
    metric: str | None = None
    best: float | None = None
    epoch: int | None = None
    last: float | None = None
    bytes: int = 0
    modified: float = 0.0
    problems: tuple[str, ...] = ()
    why: str = ""
    total: int | None = None
    saved: int | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    trials: int | None = None
    epochs: tuple[dict[str, Any], ...] = field(default=(), repr=False)
    settings: dict[str, str] = field(default_factory=dict, repr=False)
    saves: tuple[int, ...] = field(default=(), repr=False)


def has_enough(events: Sequence[Event]) -> bool:
    """Return whether `of` would return the same result if it also got the events before these."""
    kinds = {event["kind"] for event in events}
    return "driver" in kinds and bool(kinds & set(_DOING)) and any(e.get("step") and e.get("total") for e in events)


def of(
    events: Sequence[Event],
    result: dict[str, Any] | None,
    lives: bool | None,
    newest: int | None = None,
    epochs: Sequence[dict[str, Any]] = (),
    is_damaged: bool = False,
) -> Run:
    """Return the state and progress of a run, without its name and the figures of its files.

    Args:
        events: events of the ledger, in order; the last ones are enough, see `has_enough`.
        result: the run's result; None if there is none.
        lives: whether the lease's owner is alive; None if there is no lease.
        newest: step of the newest checkpoint; None if there is none.
        epochs: logs of the epochs that the newest checkpoint or the result contains.
        is_damaged: whether one of the run's files or folders cannot be read.
    """
    totals = [int(event["total"]) for event in events if event.get("total")]
    steps = [int(event["step"]) for event in events if event.get("step")]
    total = totals[-1] if totals else None
    last = next((event for event in reversed(events) if event["kind"] == "driver"), None)
    done = None if result is None else int(result["steps"])
    reached = max(steps[-1] if steps else 0, newest or 0)
    is_over = done is not None and done >= max(newest or 0, 0 if last is None else min(reached, total or reached))
    state, why = _state(events, last, is_over, done is not None, lives, is_damaged)
    is_result = state is RunState.FINISHED and done is not None
    if is_result:
        step, total = done, total if total is not None else done
    else:
        step = max([*steps[-1:], *([] if newest is None else [newest])], default=done)
    metric, best, epoch, value = _judged(epochs)
    return Run(
        name="",
        state=state,
        step=step,
        metric=metric,
        best=best,
        epoch=epoch,
        last=value,
        why=why,
        total=total,
        saved=newest,
        metrics=_numbers((result or {}).get("metrics") if is_result or not epochs else epochs[-1]),
        epochs=tuple(epochs),
    )


def main_goal(epochs: Sequence[dict[str, Any]]) -> MetricObjective | None:
    """Return the metric to judge a run by. Its name must show whether high or low values are good. Metrics of the
    validation come before metrics of the training, and losses come last in both groups.

    Args:
        epochs: the logs of the epochs.
    """
    goals = []
    for name in dict.fromkeys(name for entry in epochs for name, value in entry.items() if isinstance(value, float)):
        with contextlib.suppress(ConfigError):  # the name, such as learning_rate, does not show which values are good
            goals.append(MetricObjective.of(name))
    ranked = sorted(goals, key=lambda g: (not g.metric.startswith("val_"), g.metric.endswith("loss")))
    return ranked[0] if ranked else None


def _judged(epochs: Sequence[dict[str, Any]]) -> tuple[str | None, float | None, int | None, float | None]:
    """Return the metric to judge a run by, its best value, the epoch with that value, and the last epoch's value."""
    goal = main_goal(epochs)
    if goal is None:
        return None, None, None, None
    best: float | None = None
    best_epoch: int | None = None
    for index, epoch in enumerate(epochs):
        value = goal.value(epoch)
        if goal.is_better(value, best):
            best, best_epoch = value, int(epoch.get("epoch", index))
    return goal.metric, best, best_epoch, value


def _state(
    events: Sequence[Event],
    last: Event | None,
    is_over: bool,
    has_result: bool,
    lives: bool | None,
    is_damaged: bool,
) -> tuple[RunState, str]:
    if lives:
        doing = next((event["kind"] for event in reversed(events) if event["kind"] in _DOING), "")
        return (RunState.WAITING if doing == "waiting" else RunState.RUNNING), ""
    if is_damaged:
        return RunState.DAMAGED, ""
    if last is None:
        if is_over:
            return RunState.FINISHED, ""
        return (RunState.STOPPED, "") if lives is None else (RunState.KILLED, _GONE)
    if last.get("state") != "ended":
        return (RunState.FINISHED, "") if is_over else (RunState.KILLED, _GONE)
    if last.get("outcome") == "finished":  # the result is written last, so without it the driver died
        return (RunState.KILLED, _GONE) if lives is False and not has_result else (RunState.FINISHED, "")
    why = str(last.get("text", ""))
    if last.get("outcome") == "stopped":
        return RunState.STOPPED, why
    if why == "KeyboardInterrupt":  # earlier versions recorded Ctrl-C like this
        return RunState.STOPPED, INTERRUPTED
    return RunState.FAILED, why


def _numbers(values: Any) -> dict[str, float]:
    known = values if isinstance(values, dict) else {}
    return {
        name: float(value)
        for name, value in known.items()
        if name not in ("epoch", "step") and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
