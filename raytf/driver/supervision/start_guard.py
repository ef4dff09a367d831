"""Watches a worker group while it starts: Ray Train waits for ever for a worker that was stopped during that time."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import ray

from raytf._ray import state
from raytf.driver.supervision.hang_detector import HangEvidence
from raytf.driver.supervision.inspection import Inspector, end
from raytf.runs.events import Hang
from raytf.training.process.heartbeat_types import Activity, HeartbeatState
from raytf.training.process.monitor_client import MonitorClient

#: Seconds before the first look.
_FIRST_SECONDS = 10.0
#: Seconds between two looks; a worker must be found stopped in two in a row.
_LOOK_SECONDS = 5.0
#: Name of Ray Train's class of workers.
_WORKER = "RayTrainWorker"


class StartGuard:
    """Ends workers that were stopped while their group starts, in its own thread, until `over` is called.

    Ray Train's controller waits for them meanwhile, and treats their end as a failed start, which it tries again.

    Args:
        monitor: the driver's.
        run_uri: the run's folder.
        group: number of the group.
    """

    def __init__(self, monitor: MonitorClient, run_uri: str, group: int):
        self._monitor, self._run_uri, self._group = monitor, run_uri, group
        self._over = threading.Event()
        threading.Thread(target=self._guard, daemon=True, name="raytf-start-guard").start()

    def over(self) -> None:
        """Stop watching: the group has started, or could not."""
        self._over.set()

    def _guard(self) -> None:
        before: set[tuple[str, int]] = set()
        seconds = _FIRST_SECONDS
        while not self._over.wait(seconds):
            seconds = _LOOK_SECONDS
            with contextlib.suppress(ray.exceptions.RayError):
                beats = self._workers()
                found = Inspector(self._run_uri, beats).collect(_LOOK_SECONDS)
                stopped = [beat for beat in beats if found[beat.rank].evidence is HangEvidence.STOPPED]
                if not self._over.is_set():
                    self._end([beat for beat in stopped if (beat.node, beat.pid) in before])
                before = {(beat.node, beat.pid) for beat in stopped}

    def _workers(self) -> list[HeartbeatState]:
        """The job's living workers; they have no ranks yet, so they are numbered."""
        job = ray.get_runtime_context().job_id
        actors = state.living_actors(job)
        places = [(a["Address"]["NodeID"], a["Address"]["IPAddress"], a["Pid"]) for a in actors if _is_worker(a)]
        return [
            HeartbeatState(self._group, i, len(places), *place, activity=Activity.START)
            for i, place in enumerate(places)
        ]

    def _end(self, beats: list[HeartbeatState]) -> None:
        for beat in beats:
            text = f"a worker on node {beat.address} (pid {beat.pid}) was stopped while it started; ending it"
            self._monitor.say(text)
            why = "it was stopped while it started"
            self._monitor.book(Hang(node=beat.node, address=beat.address, pid=beat.pid, where="start", why=why))
        end(self._run_uri, beats)


def _is_worker(actor: dict[str, Any]) -> bool:
    return actor["ActorClassName"].rpartition(".")[2] == _WORKER
