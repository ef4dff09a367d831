"""Decides where a run stands: its state, why, and how far it is. Everything that shows runs to people uses it."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raytf.runs.events import INTERRUPTED
from raytf.runs.ledger import Event

#: Kinds of events that show what workers do, so that the last one counts.
_DOING = ("waiting", "group", "attempt", "phase", "progress")
_GONE = "the driver is gone without a word"


class RunState(enum.Enum):
    """The state of a run."""

    RUNNING = "running"
    WAITING = "waiting"  # its driver lives, and the cluster has no room for its workers
    FINISHED = "finished"
    STOPPED = "stopped"  # it was interrupted, or told to stop
    FAILED = "failed"  # it ended with an error
    KILLED = "killed"  # its driver died without a word, or no longer reaches the storage
    DAMAGED = "damaged"  # nobody trains it, and a file of it cannot be read


@dataclass(frozen=True)
class Standing:
    """The state of a run, with the reason and its progress.

    Attributes:
        state: of the run.
        why: what ended it, where it failed or was stopped.
        step: global steps done; None where nobody knows.
        total: global steps wanted; None where nobody said it.
        metrics: of the result, or of the last epoch that is known.
    """

    state: RunState
    why: str
    step: int | None
    total: int | None
    metrics: dict[str, float]


def has_enough(events: Sequence[Event]) -> bool:
    """Return whether earlier events than these change nothing in what `of` says."""
    kinds = {event["kind"] for event in events}
    return "driver" in kinds and bool(kinds & set(_DOING)) and any(e.get("step") and e.get("total") for e in events)


def of(
    events: Sequence[Event],
    result: dict[str, Any] | None,
    lives: bool | None,
    newest: int | None = None,
    history: Sequence[dict[str, Any]] = (),
    is_damaged: bool = False,
) -> Standing:
    """Decide.

    Args:
        events: of the ledger, in order; the last ones are enough, see `has_enough`.
        result: of the run; None for none.
        lives: whether the lease's owner does; None where there is no lease.
        newest: step of the newest checkpoint; None for none.
        history: logs of the epochs that the newest checkpoint knows.
        is_damaged: whether a file is without which the run cannot go on.
    """
    totals = [int(event["total"]) for event in events if event.get("total")]
    steps = [int(event["step"]) for event in events if event.get("step")]
    total = totals[-1] if totals else None
    last = next((event for event in reversed(events) if event["kind"] == "driver"), None)
    done = None if result is None else int(result["steps"])
    reached = max(steps[-1] if steps else 0, newest or 0)
    is_over = done is not None and done >= max(newest or 0, 0 if last is None else min(reached, total or reached))
    state, why = _state(events, last, is_over, done is not None, lives, is_damaged)
    if state is RunState.FINISHED and done is not None:
        return Standing(state, why, done, total if total is not None else done, _numbers((result or {}).get("metrics")))
    at = max([*steps[-1:], *([] if newest is None else [newest])], default=done)
    return Standing(state, why, at, total, _numbers(history[-1] if history else (result or {}).get("metrics")))


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
