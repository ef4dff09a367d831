"""A rank's reports: answers of the monitor that nobody waits for, and what only rank 0 sends."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from raytf.data.plan import StepPlan
from raytf.storage.storage import Storage
from raytf.training.process.reporter import LatestAnswer, Reporter


class Question:
    def __init__(self, value: Any):
        self.value, self.is_done = value, False

    def is_answered(self) -> bool:
        return self.is_done

    def answer(self) -> Any:
        return self.value


class Asked:
    """Questions that were asked, and a clock."""

    def __init__(self, *values: Any):
        self.now, self._values, self.questions = 100.0, iter(values), []

    def __call__(self) -> Any:
        self.questions.append(Question(next(self._values)))
        return self.questions[-1]

    def latest(self) -> LatestAnswer[int]:
        return LatestAnswer(self, 5.0, 0, lambda: self.now)


def test_an_answer_is_taken_when_it_is_there_and_nobody_waits_for_it():
    asked = Asked(7)
    latest = asked.latest()
    assert [latest.poll() for _ in range(3)] == [0, 0, 0]
    assert len(asked.questions) == 1  # a question at a time
    asked.questions[0].is_done = True
    assert latest.poll() == 7


def test_the_next_question_comes_after_a_pause():
    asked = Asked(7, 8)
    latest = asked.latest()
    latest.poll()
    asked.questions[0].is_done = True
    assert [latest.poll(), latest.poll()] == [7, 7]
    assert len(asked.questions) == 1
    asked.now += 5.0
    latest.poll()
    asked.questions[1].is_done = True
    assert latest.poll() == 8


class Monitor:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.ticket = Question(9)

    def ask_wanted(self) -> Question:
        return self.ticket

    def ask_measured(self) -> Question:
        return Question({})

    def released(self, ticket: int) -> tuple[bool, int]:
        self.calls.append(("released", ticket))
        return True, 0

    def say(self, text: str) -> None:
        self.calls.append(("say", text))

    def stage(self, text: str) -> None:
        self.calls.append(("stage", text))

    def answer(self, ticket: int, saved: bool) -> None:
        self.calls.append(("answer", ticket, saved))

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        self.calls.append(("event", kind, fields))


def reporter(folder: Any, rank: int | None) -> tuple[Reporter, Monitor]:
    monitor = Monitor()
    job: Any = SimpleNamespace(monitor=monitor, plan=StepPlan(64, 16, 4), verbose=1)
    return Reporter(job, Storage(str(folder)), rank, 2), monitor


def test_rank_0_parks_when_the_monitor_asks_until_it_is_released(tmp_path):
    own, monitor = reporter(tmp_path, 0)
    assert not own.is_parking_wanted()
    monitor.ticket.is_done = True
    assert own.is_parking_wanted()
    own.answer(True)
    assert own.is_released()
    assert monitor.calls == [("answer", 9, True), ("released", 9)]
    monitor.ticket = Question(0)
    assert not own.is_parking_wanted()


def test_other_ranks_send_only_what_concerns_themselves(tmp_path):
    for rank in (1, None):
        own, monitor = reporter(tmp_path, rank)
        own.say("to all")
        own.note("to all")
        own.stage("building")
        own.answer(True)
        assert not own.is_parking_wanted()
        assert not own.is_released()
        assert not own.is_status_due()
        assert not own.is_report_due()
        assert own.files == ""
        own.say_here("of this rank")
        own.event("audit", step=3)
        assert monitor.calls == [("say", "of this rank"), ("event", "audit", {"rank": rank, "step": 3})]
