"""Which nodes Ray Train's controller uses where they have GPUs: what Ray would tell of such nodes is made up here."""

from __future__ import annotations

import time

import pytest
import ray.train

from raytf.config.flags import ClusterSection
from raytf.driver import preflight
from raytf.driver.ray_train.scaling_policy import PolicyContext, ScalingPolicy
from raytf.driver.supervision.retry import Supervisor
from raytf.runs.events import RunEvent
from raytf.training.process.monitor_client import MonitorClient


class Told(MonitorClient):
    """In the place of the driver's, which is a process of Ray: keeps what it is told."""

    def __init__(self) -> None:
        super().__init__(None)
        self.said: list[str] = []
        self.left: dict[str, float] = {}

    def say(self, message: str) -> None:
        self.said.append(message)

    def book(self, event: RunEvent) -> None:
        self.said.append(type(event).__name__)

    def set_noticed(self, ranks: dict[int, str]) -> None:
        pass

    def seconds_left(self, node: str, seconds: float) -> float | None:
        return self.left.get(node)


def node(kind: str, gpus: float, cpus: float = 8.0) -> dict:
    accelerator = {f"accelerator_type:{kind}": 1.0} if kind else {}
    return {"Resources": {"CPU": cpus, "GPU": gpus, **accelerator}, "Labels": {}}


NODES = {"a1": node("L4", 1), "a2": node("L4", 1), "b1": node("A10G", 1), "c": node("", 0)}


def policy(workers: tuple[int, int], keeps: bool = False, share: float = 1.0, **flags) -> tuple[ScalingPolicy, Told]:
    each = {"CPU": 1.0, "GPU": share}
    scaling = ray.train.ScalingConfig(num_workers=workers, use_gpu=True, resources_per_worker=each)
    monitor, section = Told(), ClusterSection(warm_workers=False, **flags)
    return ScalingPolicy(scaling, PolicyContext("r", monitor, "/r", section, Supervisor(), keeps)), monitor


def chosen(made: ScalingPolicy, nodes: dict) -> list[str]:
    return sorted(n for n in made._choose({n: about["Resources"] for n, about in nodes.items()}, nodes) if n != "c")


def test_a_group_is_on_one_kind_and_that_is_said_once():
    made, monitor = policy((1, 8))
    assert [chosen(made, NODES) for _ in range(3)] == [["a1", "a2"]] * 3
    assert [line[:22] for line in monitor.said] == ["left out: b1 (A10G). A"]
    assert "--mixed-gpus" in monitor.said[0]


def test_mixed_gpus_takes_all():
    made, monitor = policy((1, 8), mixed_gpus=True)
    assert chosen(made, NODES) == ["a1", "a2", "b1"]
    assert monitor.said == []


@pytest.mark.parametrize(("keeps", "expected"), [(False, ["b1", "b2", "b3"]), (True, ["a1", "a2"])])
def test_a_run_that_promises_its_bits_stays_on_its_kind(keeps, expected):
    made, _ = policy((1, 8), keeps)
    more = NODES | {"b2": node("A10G", 1), "b3": node("A10G", 1)}
    assert chosen(made, NODES) == ["a1", "a2"]
    made._kind = made._next_kind  # as when a group starts
    assert chosen(made, more) == expected


def test_a_larger_kind_that_the_run_cannot_use_changes_nothing():
    made, _ = policy((1, 2))
    assert chosen(made, NODES) == ["a1", "a2"]
    made._kind = made._next_kind
    assert chosen(made, NODES | {"b2": node("A10G", 8)}) == ["a1", "a2"]


def test_a_node_that_computes_wrongly_stays_until_there_is_another_one():
    made, monitor = policy((2, 2))
    two = {name: NODES[name] for name in ("a1", "a2")}
    made._run.supervisor.exclusion.computes_wrongly(["a1"])
    assert chosen(made, two) == ["a1", "a2"]
    assert made._unwanted == ["a1"]
    assert chosen(made, two | {"a3": node("L4", 1)}) == ["a2", "a3"]
    assert monitor.said == ["node a1 is left out: a worker on it computed wrongly", "Exclude"]


def test_parts_of_gpus_are_counted_as_ray_gives_them():
    made, _ = policy((1, 99), share=0.2)
    assert made._count_possible_workers({"a": {"CPU": 99.0, "GPU": 2.0}, "b": {"CPU": 3.0, "GPU": 1.0}}) == 13


def test_before_a_run_starts_one_kind_is_counted_too():
    nodes = [about["Resources"] for about in NODES.values()]
    assert preflight.of_one_kind(nodes, {"CPU": 1.0, "GPU": 1.0}) == nodes[:2]


@pytest.mark.parametrize("skew", [3, 3600, -3600])
def test_when_a_node_goes_is_known_whatever_its_clock_and_this_machines_say(skew, monkeypatch):
    made, monitor = policy((2, 2))
    began, real = time.monotonic(), time.time()
    monitor.left["a1"] = 60.0
    made._leaving = {"a1": int((real + 60 + skew) * 1000), "b1": int((real + 5) * 1000)}
    end = made._follow_notices({0: "a1", 1: "a2"})
    assert end == pytest.approx(began + 60, abs=3)
    monkeypatch.setattr(time, "time", lambda: real - skew)
    assert made._follow_notices({0: "a1", 1: "a2"}) == end


def test_a_node_leaves_when_ray_reports_it_also_if_the_clock_is_set_then(monkeypatch):
    made, _ = policy((2, 2))
    began, real = time.monotonic(), time.time()
    made._leaving = {"a1": int((real + 60) * 1000), "a2": 0}
    end = made._follow_notices({0: "a1", 1: "a2"})
    assert end == pytest.approx(began + 60, abs=3)
    monkeypatch.setattr(time, "time", lambda: real - 3600)
    assert made._follow_notices({0: "a1", 1: "a2"}) == end
    made._leaving = {"a2": int((real - 3600 + 20) * 1000)}  # of which nothing was known before
    assert made._follow_notices({0: "a1", 1: "a2"}) == pytest.approx(time.monotonic() + 20, abs=3)
