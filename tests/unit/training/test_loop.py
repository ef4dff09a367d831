"""The training loop: what it does in which order, and that it continues where ranks meet again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from raytf.checkpoint.training_state import TrainingState
from raytf.data.plan import StepPlan
from raytf.training import loop
from raytf.training.loop import TrainLoop
from raytf.training.regroup import RegroupError

PLAN = StepPlan(64, 16, 4)  # 4 steps an epoch


class Executor:
    """Trains two epochs; notes what it is asked for."""

    def __init__(self, session: Any, calls: list[Any], error: Exception | None = None):
        self._session, self._calls, self._error = session, calls, error

    def begin_epoch(self, epoch: int) -> None:
        self._calls.append(("begin epoch", epoch))

    def train_until(self, stop: int) -> None:
        error, self._error = self._error, None
        if error is not None:
            self._session.state.step += 1
            raise error
        self._calls.append(("train until", stop))
        self._session.state.step = stop

    def rest(self) -> None:
        self._calls.append("rest")

    def settle(self) -> None:
        self._calls.append("settle")

    def result(self) -> dict[str, Any]:
        return {"updates": 8}

    def ended(self, result: dict[str, Any] | None) -> dict[str, Any] | None:
        return result


class Session:
    def __init__(self, calls: list[Any], error: Exception | None = None, loss: str = "", stop_step: int | None = None):
        self.state, self.plan, self.ended, self.ending = TrainingState(), PLAN, 0, None
        self.job = SimpleNamespace(
            end_step=8 if stop_step is None else stop_step, stop_step=stop_step, epoch_of=lambda step: step // 4
        )
        self.heartbeat = SimpleNamespace(settle=lambda activity, step: None)
        self.group = SimpleNamespace(loss=loss)
        self.callbacks = SimpleNamespace(begin=lambda what, step: None)
        self.saving = SimpleNamespace(start=lambda: calls.append("save"), finish=lambda: calls.append("finish saves"))
        self.reporter = SimpleNamespace(finish=lambda: None)
        self.saves_again = False
        self.executor = Executor(self, calls, error)

    @property
    def is_at_epoch_end(self) -> bool:
        return self.plan.is_epoch_end(self.state.step)

    def show(self, phase: str) -> None:
        pass


@pytest.fixture
def calls(monkeypatch) -> list[Any]:
    calls: list[Any] = []

    class EpochEnd:
        def __init__(self, session: Any):
            self.step = session.state.step

        def run(self, session: Any) -> None:
            calls.append(("end of epoch", self.step))

    monkeypatch.setattr(loop, "EpochEnd", EpochEnd)
    monkeypatch.setattr(loop, "finish", lambda session: {"steps": session.state.step})
    return calls


def trained(session: Any) -> Any:
    return TrainLoop(session).train()


def test_epochs_end_before_the_state_of_their_last_step_is_saved(calls):
    assert trained(Session(calls)) == {"steps": 8, "updates": 8}
    assert calls == [
        ("begin epoch", 0),
        ("train until", 4),
        ("end of epoch", 4),
        "rest",
        ("begin epoch", 1),
        ("train until", 8),
        ("end of epoch", 8),
        "rest",
        "settle",
        "finish saves",
    ]


def test_a_run_that_stops_inside_an_epoch_does_not_end_it(calls):
    assert trained(Session(calls, stop_step=6)) == {"steps": 6, "updates": 8}
    assert ("end of epoch", 4) in calls
    assert ("end of epoch", 6) not in calls


def test_a_callback_that_stops_the_run_ends_its_epoch(calls):
    session = Session(calls)
    session.state.step, session.state.stopped_early = 6, True
    trained(session)
    assert calls == ["settle", "finish saves", ("end of epoch", 6)]


@pytest.mark.parametrize(
    ("error", "loss"),
    [(RegroupError("a rank waits"), ""), (tf.errors.UnavailableError(None, None, "gone"), "rank 1 is lost")],
)
def test_the_loop_continues_where_the_ranks_meet_again(calls, monkeypatch, error, loss):
    def meet_again(before: Any) -> Any:
        after = Session(calls)
        after.state, after.saves_again = before.state, True
        calls.append(("meet", before.state.step))
        return after

    monkeypatch.setattr(loop.startup, "meet_again", meet_again)
    assert trained(Session(calls, error, loss)) == {"steps": 8, "updates": 8}
    assert calls[:4] == [("begin epoch", 0), ("meet", 1), "save", ("train until", 4)]


def test_an_error_of_tensorflow_without_a_lost_rank_ends_the_run(calls):
    with pytest.raises(tf.errors.InvalidArgumentError):
        trained(Session(calls, tf.errors.InvalidArgumentError(None, None, "shapes")))
