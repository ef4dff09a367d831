"""One decision for all that train: whether a run goes on after a failure, when and where, and what is said."""

from __future__ import annotations

import dataclasses
import pickle

import pytest

from raytf.driver.supervision.diagnosis import ControllerDiedError, until_done
from raytf.driver.supervision.failures import Cause, Failure
from raytf.driver.supervision.retry import Scene, Supervisor, is_preemption
from raytf.errors import ClusterError, DataError, ProcessDiedError, RaytfError
from raytf.runs.events import FaultEvent, RunEvent
from raytf.training.process.monitor_client import MonitorClient

NODE = "abcdef" * 9 + "ab"
DIED = Failure(Cause.WORKER_DIED, "1 worker process died", ranks=(1,), dead=frozenset({1}))
SCENE = Scene(100, {0: "a", 1: "b"})


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("dead", "is_peer_missed", "noticed", "preempted"),
    [
        (set(), True, set(), False),  # nobody had notice
        ({1}, True, set(), False),
        ({1}, True, {1}, True),  # the one that had notice died, and the others miss it
        ({1}, False, {1}, True),  # a dying peer can make TensorFlow raise anything
        ({0, 1}, False, {0, 1}, True),  # both ranks of a node
        ({0}, True, {1}, False),  # another one died
        ({0, 1}, True, {1}, False),
        (set(), True, {1}, True),  # a peer is missed, and Ray does not know yet which one is dead
        (set(), False, {1}, False),  # an error of the job while its node has notice
    ],
)
def test_the_loss_of_a_node_with_notice_is_no_failure(dead, is_peer_missed, noticed, preempted):
    failure = Failure(Cause.PEER_LOST, "lost", dead=frozenset(dead), is_peer_missed=is_peer_missed)
    assert is_preemption(failure, noticed) is preempted
    assert not is_preemption(dataclasses.replace(failure, cause=Cause.ERROR), noticed)


def test_a_death_is_tried_again_blames_its_node_and_waits_longer_each_time():
    clock = Clock()
    supervisor = Supervisor(clock)
    first = supervisor.decide(DIED, SCENE)
    assert (first.retry, first.pause, first.message) == (True, 0.0, "1 worker process died; starting again")
    assert first.fault == FaultEvent("worker_died", (1,), ["b"], "1 worker process died", retry=True)
    for pause in (1.0, 2.0):
        assert supervisor.decide(DIED, SCENE).pause == pause
        assert supervisor.resumes_at == clock.now + pause
    assert supervisor.exclusion.count("b", clock.now) == 3
    assert supervisor.exclusion.count("a", clock.now) == 0


def test_the_loss_of_a_node_with_notice_is_told_and_costs_nothing():
    clock, asked = Clock(), []
    supervisor = Supervisor(clock)
    scene = dataclasses.replace(SCENE, noticed={1: NODE})
    for _ in range(20):
        decision = supervisor.decide(DIED, scene, lambda: asked.append(1) or False)
        assert (decision.retry, decision.pause) == (True, 0.0)
        assert decision.message == "node abcdefab is gone, as announced; starting again"
        assert decision.fault == FaultEvent("node_lost", [1], [NODE], "node abcdefab is gone, as announced", True, True)
    assert not asked
    assert supervisor.exclusion.count(NODE, clock.now) == 0


def test_an_error_of_the_job_blames_no_node():
    supervisor = Supervisor(Clock())
    error = Failure(Cause.ERROR, "KeyError", "KeyError", 100, ranks=(1,))
    decision = supervisor.decide(error, SCENE)
    assert decision.retry
    assert decision.fault.nodes == ["b"]
    assert supervisor.exclusion.count("b", 100.0) == 0
    last = supervisor.decide(error, SCENE)
    assert (last.retry, last.fault.retry) == (False, False)
    assert last.message == "not tried again: KeyError, the same as before at the same step"


def test_a_budget_that_is_used_up_is_said_and_booked():
    supervisor, budget = Supervisor(Clock()), iter([True, False]).__next__
    assert supervisor.decide(DIED, SCENE, budget).retry
    last = supervisor.decide(DIED, SCENE, budget)
    assert (last.retry, last.fault.retry) == (False, False)
    assert last.message == "1 worker process died; not tried again: --max-failures is used up"


def test_what_says_all_by_itself_is_not_said_twice():
    decision = Supervisor(Clock()).decide(Failure(Cause.ERROR, "labels", is_final=True), SCENE)
    assert (decision.retry, decision.message) == (False, "")


def test_policies_sent_one_by_one_share_one_supervisor_where_they_arrive():
    supervisor = Supervisor()
    first, second = (pickle.loads(pickle.dumps(supervisor)) for _ in range(2))
    assert first is second
    assert pickle.loads(pickle.dumps(Supervisor())) is not first
    first.decide(DIED, SCENE)
    assert second.exclusion.count("b", second.resumes_at) == 1


class Booked(MonitorClient):
    """In the place of the driver's, which is a process of Ray: keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(None)
        self.faults: list[RunEvent] = []

    def book(self, event: RunEvent) -> None:
        self.faults.append(event)

    def reached(self, seconds: float) -> int:
        return 100 + len(self.faults)


def test_attempts_follow_each_other_until_one_succeeds():
    monitor, said = Booked(), []
    ends = iter([ProcessDiedError("the coordinator died"), ControllerDiedError("gone"), None])

    def attempt() -> str:
        error = next(ends)
        if error is not None:
            raise error
        return "done"

    assert until_done(attempt, (RaytfError,), monitor, -1, said.append) == "done"
    assert said == ["the coordinator died; starting again", "Ray Train's controller died; starting another one"]
    assert [fault.text for fault in monitor.faults] == ["the coordinator died", "Ray Train's controller died"]


@pytest.mark.parametrize(
    ("error", "budget", "kind", "said"),
    [
        (DataError("labels"), -1, DataError, []),
        (
            ProcessDiedError("the coordinator died"),
            0,
            ClusterError,
            ["the coordinator died; not tried again: --max-failures is used up"],
        ),
    ],
)
def test_the_error_that_ends_a_run_is_raised_and_booked(error, budget, kind, said):
    monitor, lines = Booked(), []

    def attempt() -> None:
        raise error

    with pytest.raises(kind):
        until_done(attempt, (RaytfError,), monitor, budget, lines.append)
    assert lines == said
    assert [fault.text.endswith("; the run ends") for fault in monitor.faults] == [True]


def test_an_error_that_ends_no_attempt_ends_the_run():
    def attempt() -> None:
        raise DataError("labels")

    monitor = Booked()
    with pytest.raises(DataError):
        until_done(attempt, (ControllerDiedError,), monitor, -1, print)
    assert monitor.faults == []
