"""The monitor's process is killed again and again, and everything that it is told arrives once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from raytf.driver.monitor.reader import MonitorReader, monitoring
from raytf.training.process.heartbeat_types import Activity, HeartbeatState
from tests.ray.conftest import PATIENCE

#: Words of each speaker, and kills.
WORDS, KILLS = 150, 4


@pytest.fixture
def ray(cluster: dict[str, str]) -> Iterator[Any]:
    import ray

    with pytest.MonkeyPatch.context() as env:
        env.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(address=cluster["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
        try:
            yield ray
        finally:
            ray.shutdown()


class Book(list):
    add = list.extend


def pid(ray: Any, monitor: Any) -> int:
    """Of the process that lives now, once there is one."""
    deadline = time.monotonic() + PATIENCE
    while True:
        about = ray._private.state.state.actor_table(monitor.handle._actor_id.hex(), None, None)
        if about and about["State"] == "ALIVE" and about["Pid"]:
            return int(about["Pid"])
        assert time.monotonic() < deadline, about
        time.sleep(0.02)


def test_everything_that_is_told_arrives_once(ray: Any):
    def speak(monitor: Any, name: str) -> None:
        for i in range(WORDS):
            monitor.say(f"{name} {i}")
            monitor.event("word", {"name": name, "number": i})
            time.sleep(0.03)

    book = Book()
    with monitoring(["a"]) as monitor:
        ear = MonitorReader(monitor, book)
        group = monitor.begin_group(PATIENCE)
        assert monitor.begin("b")[:2] == (["a"], None)
        ticket = monitor.park(PATIENCE)
        beat = HeartbeatState(group, 0, 1, "n", "10.0.0.1", 1, step=7, activity=Activity.LOOP)
        ray.get(monitor.handle.beat.remote(beat), timeout=PATIENCE)
        time.sleep(1.1)  # beats alone are noted once a second, since they come again
        ray.get(monitor.handle.beat.remote(beat), timeout=PATIENCE)

        speakers = [ray.remote(num_cpus=0)(speak).remote(monitor, name) for name in ("one", "two")]
        heard: list[str] = []
        killed: set[int] = set()
        deadline = time.monotonic() + PATIENCE
        while len(heard) < 2 * WORDS or len(book) < 2 * WORDS or len(killed) < KILLS:
            assert time.monotonic() < deadline, (len(heard), len(book), killed)
            heard += ear.read(PATIENCE)[1]
            if len(heard) > len(killed) * 2 * WORDS // (KILLS + 1):
                living = pid(ray, monitor)
                if living not in killed:
                    os.kill(living, signal.SIGKILL)
                    killed.add(living)
        ray.get(speakers, timeout=PATIENCE)
        expected = [f"{name} {i}" for name in ("one", "two") for i in range(WORDS)]
        assert sorted(heard) == sorted(expected)
        assert sorted(f"{e['name']} {e['number']}" for e in book) == sorted(expected)
        assert [e["time"] for e in book] == sorted(e["time"] for e in book)

        assert monitor.group() == group
        assert monitor.ask_wanted().answer() == ticket
        assert [s.beat.step for s in monitor.sightings(PATIENCE)] == [7]
        assert monitor.begin("c")[:2] == (["a", "b"], None)
        last = pid(ray, monitor)
    deadline = time.monotonic() + PATIENCE
    while os.path.exists(f"/proc/{last}"):
        assert time.monotonic() < deadline, "the monitor outlives its driver"
        time.sleep(0.05)
