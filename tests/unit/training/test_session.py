"""A rank's session: the status that it reports, and the end of an epoch, which happens once also if a rank is lost."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from raytf.checkpoint.training_state import TrainingState
from raytf.data.plan import StepPlan
from raytf.training import session as sessions
from raytf.training.session import EpochEnd, RankSession

PLAN = StepPlan(64, 16, 4)  # 4 steps an epoch


class Reporter:
    def __init__(self, is_due: bool = False):
        self.is_due = is_due
        self.statuses: list[Any] = []
        self.reports: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.written: list[dict[str, float]] = []

    def show(self, status: Any) -> None:
        self.statuses.append(status)

    def is_report_due(self) -> bool:
        return self.is_due

    def report(self, metrics: dict[str, Any]) -> None:
        self.reports.append(metrics)

    def scalars(self, values: dict[str, float], step: int) -> None:
        self.written.append(values)

    def note(self, text: str) -> None:
        self.notes.append(text)


class Callbacks:
    stopped = False

    def __init__(self) -> None:
        self.ended: list[dict[str, Any]] = []

    def end_epoch(self, epoch: int, logs: dict[str, Any]) -> dict[str, Any]:
        self.ended.append({"epoch": epoch, **logs})
        return logs


def sum_alone(values: np.ndarray) -> np.ndarray:
    return values


def a_session(rank: int = 0, step: int = 4, is_due: bool = False) -> Any:
    job = SimpleNamespace(
        config=None,
        plan=PLAN,
        total_steps=8,
        epochs=2,
        epoch_of=lambda step: PLAN.locate(step)[0],
        validates_after=lambda epoch: True,
    )
    heartbeat = SimpleNamespace(trace_seconds=1.5, doing=lambda activity: contextlib.nullcontext(), progress=None)
    group = SimpleNamespace(rank=rank, sum=sum_alone)
    rest: Any = (SimpleNamespace(workers=3), group, None, Reporter(is_due))
    made: Any = RankSession(job, heartbeat, None, *rest)  # type: ignore[arg-type]
    made.state = TrainingState(step=step, durable_step=2)
    made.model = SimpleNamespace(reset_metrics=lambda: None)
    made.callbacks = Callbacks()
    made.memory = SimpleNamespace(step=3, bytes=10)
    policy = SimpleNamespace(check_goal=lambda logs: None)
    made.saving = SimpleNamespace(
        stall_seconds=0.5, trouble=lambda: None, policy=policy, is_best=lambda: False, keep_best=lambda: None
    )
    made.sources = SimpleNamespace(validation=None)
    made.seconds_per_step = 0.0
    return made


@pytest.fixture(autouse=True)
def metrics(monkeypatch):
    monkeypatch.setattr(sessions.models, "logs", lambda model: {"loss": 0.25})
    monkeypatch.setattr(sessions.models, "numbers", lambda model: {"loss": 0.25})


@pytest.mark.parametrize(
    ("phase", "step", "epoch"),
    [("training", 4, 2), ("validating", 4, 1), ("training", 3, 1), ("training", 8, 2), ("starting", 0, 1)],
)
def test_a_status_has_the_epoch_that_is_being_trained(phase, step, epoch):
    session = a_session(step=step)
    session.show(phase)
    (status,) = session.reporter.statuses
    assert (status.epoch, status.epochs, status.step, status.total) == (epoch, 2, step, 8)
    assert (status.workers, status.checkpoint, status.snapshot, status.trace_seconds) == (3, 2, 3, 1.5)
    assert status.metrics == {}  # nothing was trained in this attempt


def test_a_status_has_the_metrics_of_the_steps_that_were_trained():
    session = a_session()
    session.seconds_per_step = 0.1
    session.show("training")
    session.show("training", {"loss": 1.0})
    assert [status.metrics["loss"] for status in session.reporter.statuses] == [0.25, 1.0]


def test_only_rank_0_reports_a_status():
    session = a_session(rank=1)
    session.show("training")
    assert not session.reporter.statuses


def test_the_end_of_an_epoch_is_noted_and_reported_once():
    session = a_session(is_due=True)
    end = EpochEnd(session)
    end.run(session)
    end.run(session)  # as after a rank was lost in it
    assert [logs["epoch"] for logs in session.callbacks.ended] == [0, 0]
    assert session.state.history == [{"epoch": 0, "step": 4, "loss": 0.25}]
    assert session.reporter.notes == ["epoch 1: loss 0.25"]
    assert session.reporter.written == [{"epoch_loss": 0.25}]
    assert session.reporter.reports == [{"loss": 0.25, "epoch": 0, "step": 4}]


def test_no_report_is_made_that_is_not_due():
    session = a_session()
    EpochEnd(session).run(session)
    assert not session.reporter.reports


def test_an_epoch_is_validated_again_only_for_a_rank_that_lacks_it():
    session = a_session()
    session.sources = SimpleNamespace(validation="source")
    computed = []
    session.evaluator = lambda name, source: SimpleNamespace(
        run=lambda progress: computed.append((name, source)) or {"loss": 0.5}
    )
    end = EpochEnd(session)
    end.run(session)
    end.run(session)
    assert computed == [("validation", "source")]
    assert session.state.history == [{"epoch": 0, "step": 4, "loss": 0.25, "val_loss": 0.5}]
    session.group.sum = lambda values: values + 1.0  # another rank has not validated
    end.run(session)
    assert len(computed) == 2


def test_a_callback_that_stops_the_run_stops_it_at_the_end_of_an_epoch():
    session = a_session()
    session.callbacks.stopped = True
    EpochEnd(session).run(session)
    assert session.state.stopped_early
