"""Workers that are lost while others go on: what the policies decide of it. Ray's processes are made up here."""

from __future__ import annotations

import pickle
from types import SimpleNamespace

import pytest
import ray
import ray.train
from ray.train import WorkerGroupError

from raytf._ray.train import FailureDecision
from raytf.distributed.membership.arbiter_link import ArbiterLink, worker_name
from raytf.distributed.membership.member import LeftBehindError, UnreachableError
from raytf.driver.arbiter import ArbiterServer
from raytf.driver.ray_train import scaling_policy
from raytf.driver.ray_train.resizing import Departures
from raytf.driver.ray_train.run import FailurePolicy
from raytf.driver.supervision.retry import Supervisor
from raytf.errors import GpuError, HangError, JobError, ReplicaError, StorageError, WorkerLostError
from raytf.training.process.monitor_client import MonitorClient


class Told(MonitorClient):
    """In the place of the driver's, which is a process of Ray: keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(None)
        self.said: list[str] = []
        self.booked: list = []

    def say(self, message: str) -> None:
        self.said.append(message)

    def book(self, event) -> None:
        self.booked.append(event)

    def sightings(self, seconds: float) -> list:
        return []

    def reached(self, seconds: float) -> int:
        return 40

    def noticed(self, seconds: float) -> dict[int, str]:
        return {}


def died() -> ray.exceptions.RayActorError:
    return ray.exceptions.RayActorError()


BEHIND, MISSED = LeftBehindError("the others went on"), WorkerLostError("a peer")


@pytest.mark.parametrize(
    ("failures", "lost"),
    [
        ({1: died()}, {1}),
        ({0: died(), 2: died()}, {0, 2}),
        ({1: HangError("it stands still")}, {1}),
        ({1: BEHIND}, {1}),
        ({0: died(), 1: BEHIND}, {0, 1}),
        # Who misses a peer in a way that cannot be repaired has ended, and so have all others, or will.
        ({0: died(), 1: MISSED}, None),
        ({1: MISSED}, None),
        ({1: JobError("a callback")}, None),
        ({1: StorageError("away", "unreachable")}, None),
        ({1: GpuError("ECC", "n1")}, None),
        ({0: ReplicaError("weights differ", [1], 0), 1: ReplicaError("weights differ", [1], 1)}, None),
    ],
)
def test_either_those_that_are_lost_are_replaced_or_all_start_again(failures, lost):
    monitor = Told()
    policy = FailurePolicy(ray.train.FailureConfig(max_failures=-1), monitor, None, Supervisor(), is_partial=True)
    policy.size = 3
    decision = policy.make_decision(WorkerGroupError("failed", failures))
    assert (decision, policy.lost) == (FailureDecision.RETRY, lost)
    (fault,) = monitor.booked
    assert fault.survived == (lost is not None)
    assert monitor.said[-1].endswith("; the others continue") == (lost is not None)


def test_a_worker_that_others_cannot_reach_is_booked_to_its_node():
    monitor, apart = Told(), UnreachableError("cut off", "node-2")
    policy = FailurePolicy(ray.train.FailureConfig(max_failures=-1), monitor, None, Supervisor(), is_partial=True)
    policy.size = 3
    assert policy.make_decision(WorkerGroupError("failed", {2: apart})) is FailureDecision.RETRY
    (fault,) = monitor.booked
    assert (fault.nodes, fault.survived, policy.lost) == (["node-2"], True, {2})
    assert "cannot reach each other; node node-2); the others continue" in monitor.said[-1]
    assert pickle.loads(pickle.dumps(apart)).node == "node-2"


@pytest.mark.parametrize(("left", "survived"), [({2}, True), ({0, 2}, False)])
def test_who_has_left_as_planned_does_not_survive(left, survived):
    monitor = Told()
    policy = FailurePolicy(ray.train.FailureConfig(max_failures=-1), monitor, None, Supervisor(), is_partial=True)
    policy.size, policy.left = 3, left
    policy.make_decision(WorkerGroupError("failed", {1: died()}))
    assert policy.lost == {1, *left}
    assert monitor.booked[0].survived is survived


def test_where_nobody_goes_on_all_start_again():
    policy = FailurePolicy(ray.train.FailureConfig(max_failures=-1), Told(), None, Supervisor())
    policy.size = 3
    policy.make_decision(WorkerGroupError("failed", {1: died()}))
    assert policy.lost is None


def test_who_is_dismissed_is_waited_for_and_dropped_once_it_has_left():
    clock = SimpleNamespace(now=0.0)
    departures = Departures(lambda: clock.now)
    places = [("n", 1), ("n", 2)]
    departures.dismiss([("n", 2)])
    assert departures.are_awaited
    assert departures.left(places, []) == set()
    assert departures.left(places, [1]) == {1}
    assert departures.take() == {1}
    assert departures.take() == set()
    # One that ends without having been told to, as all do in the end, has not left.
    assert departures.left(places[:1], [0]) == set()
    # What does not come is not waited for without end.
    departures.dismiss([("n", 1)])
    clock.now += 1000
    assert not departures.are_awaited


def test_the_arbiter_is_told_who_is_to_leave():
    server = ArbiterServer("127.0.0.1")
    try:
        stays, leaves = (ArbiterLink.connect(server.address, worker_name("n", pid)) for pid in (1, 2))
        scaling_policy.dismiss(server.address, [("n", 2)], [])
        stays.close()
        leaves.close()
    finally:
        server.close()
    scaling_policy.dismiss(server.address, [("n", 2)], [])  # it has ended with the driver
