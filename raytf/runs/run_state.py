"""The state and progress of a run: `Run`, which everything that shows runs to people uses, and how it is decided."""

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

#: Kinds of events that show what workers do, so that the last one counts.
_DOING = ("waiting", "group", "attempt", "phase", "progress")
_GONE = "the driver is gone without a word"


class RunState(enum.StrEnum):
    """The state of a run."""

    RUNNING = "running"
    WAITING = "waiting"  # its driver lives, and the cluster has no room for its workers
    FINISHED = "finished"
    STOPPED = "stopped"  # it was interrupted, or asked to stop
    FAILED = "failed"  # it ended with an error
    KILLED = "killed"  # its driver died without a word, or no longer reaches the storage
    DAMAGED = "damaged"  # nobody trains it, and one of its files cannot be read


@dataclass(frozen=True)
class Run:
    """A run in a storage, or a search with its trials. `raytf runs --json` prints the fields in this order.

    Attributes:
        name: its folder, relative to the storage.
        step: global steps done; None where it is not known, and for a search.
        checkpoints: folders with a manifest.
        metric, best, epoch, last: the best value of a metric so far, the epoch that had it (from 0), and the value of
            the last epoch; None where no epoch has ended.
        bytes: of all its files.
        modified: seconds of the epoch when one of its files last changed, by the storage's clock.
        problems: what is wrong with its files, a line each; `raytf verify` reads all of them.
        why: what ended it, where it failed or was stopped.
        total: global steps wanted; None where it is not known.
        saved: step of the newest checkpoint; None for none.
        metrics: of the result, or of the last known epoch.
        trials: of a search, how many have begun; None for a run.
        epochs: logs of the epochs that have ended, with `epoch` (from 0) and `step`.
        settings: what must be the same when the run is resumed, by name.
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
    """Return whether events before these change nothing in the result of `of`."""
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
    """Return state and progress of a run, without a name and without figures of its files.

    Args:
        events: of the ledger, in order; the last ones are enough, see `has_enough`.
        result: of the run; None for none.
        lives: whether the lease's owner does; None where there is no lease.
        newest: step of the newest checkpoint; None for none.
        epochs: logs of the epochs that the newest checkpoint or the result knows.
        is_damaged: whether a file is damaged without which the run cannot continue.
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
    """Return the metric to judge a run by: one whose name tells which values are good; of the validation where there is
    one, and rather not the loss.

    Args:
        epochs: their logs.
    """
    goals = []
    for name in dict.fromkeys(name for entry in epochs for name, value in entry.items() if isinstance(value, float)):
        with contextlib.suppress(ConfigError):  # seconds or a learning rate, say
            goals.append(MetricObjective.of(name))
    ranked = sorted(goals, key=lambda g: (not g.metric.startswith("val_"), g.metric.endswith("loss")))
    return ranked[0] if ranked else None


def _judged(epochs: Sequence[dict[str, Any]]) -> tuple[str | None, float | None, int | None, float | None]:
    """Return the metric to judge a run by, its best value, the epoch that had it, and the last epoch's value."""
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
    if last.get("outcome") == "finished":  # of which the result is the last sign
        return (RunState.KILLED, _GONE) if lives is False and not has_result else (RunState.FINISHED, "")
    why = str(last.get("text", ""))
    if last.get("outcome") == "stopped":
        return RunState.STOPPED, why
    if why == "KeyboardInterrupt":  # as earlier versions wrote it
        return RunState.STOPPED, INTERRUPTED
    return RunState.FAILED, why


def _numbers(values: Any) -> dict[str, float]:
    known = values if isinstance(values, dict) else {}
    return {
        name: float(value)
        for name, value in known.items()
        if name not in ("epoch", "step") and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
