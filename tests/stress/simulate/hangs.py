"""Who makes no progress in a simulated run: the heartbeats that the driver has, and raytf's `HangDetector`."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from raytf.driver.supervision.hang_detector import HangDetector, HangEvidence, Heartbeats
from raytf.training.process.heartbeat_types import Activity, HangFinding, HeartbeatState, LastHeartbeat
from tests.stress.simulate.world import BROKEN_SECONDS, Violation

if TYPE_CHECKING:
    from tests.stress.simulate.group import Run, Worker

#: Seconds within which a hang is found, as by default.
HANG_SECONDS = 30.0
#: Seconds until the stacks of all ranks are there.
_STACKS_SECONDS = 4.0
#: Host of the driver.
HEAD = "head"


def is_hung(worker: Worker) -> bool:
    """Whether a worker waits for data that never come."""
    return worker.phase == "computing" and math.isinf(worker.seconds)


def _activity(worker: Worker) -> Activity:
    if worker.phase in ("asking", "meeting"):
        return Activity.TRANSFER if worker.member.has_joined else Activity.START
    if worker.phase == "restoring":
        return Activity.START
    if worker.phase == "summing":
        return Activity.COLLECTIVE
    return Activity.INPUT if is_hung(worker) and worker.hangs_alone else Activity.STEP


class Hangs:
    """Of one driver's workers.

    Args:
        run: to which they belong.
    """

    def __init__(self, run: Run):
        self._run = run
        self._beats, self._detector = Heartbeats(), HangDetector(HANG_SECONDS)
        self._evidence: dict[int, HangEvidence] = {}
        self._finding: HangFinding | None = None
        self._found_at = float("-inf")
        #: When the present workers joined, and worker -> what it does and since when.
        self._joined: dict[Worker, float] = {}
        self._progress: dict[Worker, tuple[tuple[int, str, int], float]] = {}

    def begin(self) -> None:
        """A group starts."""
        self._beats.begin()
        self._evidence, self._finding, self._joined, self._progress = {}, None, {}, {}

    def forget(self, ranks: Collection[int]) -> None:
        """Other workers have these ranks now."""
        self._beats.forget(ranks)
        self._evidence, self._finding = {}, None

    def look(self, group: Sequence[Worker]) -> list[int]:
        """Look at a group that runs; returns the ranks to blame once that is certain."""
        now = self._run.world.now
        if self._finding is not None:
            return self._concluded(group)
        sightings = self._sightings(group)
        report = self._detector.judge(now, sightings, self._evidence)
        self._evidence = {rank: self._examined(group[rank]) for rank in report.suspects}
        if report.finding is not None:
            self._finding, self._found_at = report.finding, now
            self._check_finding(group, report.finding)
        return []

    def _concluded(self, group: Sequence[Worker]) -> list[int]:
        assert self._finding is not None
        if self._run.world.now - self._found_at < _STACKS_SECONDS:
            return []
        finding, self._finding = self._finding, None
        return [beat.rank for beat in finding.beats if beat.rank < len(group)]

    def _sightings(self, group: Sequence[Worker]) -> list[LastHeartbeat]:
        now, head = self._run.world.now, self._run.driver.process
        for rank, worker in enumerate(group):
            self._joined.setdefault(worker, now)
            doing = worker.step, worker.phase, worker.member.number
            if self._progress.get(worker, (None, 0.0))[0] != doing:
                self._progress[worker] = doing, now
            process = worker.process
            if process.is_alive and not process.is_frozen and not self._run.network.is_cut(process.host, head.host):
                self._beats.hear(self._beat(worker, rank, len(group)), now)
        heard = {one.beat.rank: one for one in self._beats.sightings(now)}
        for rank, worker in enumerate(group):
            if rank not in heard:
                beat = HeartbeatState(0, rank, len(group), worker.process.host, "", 0)
                heard[rank] = LastHeartbeat(beat, now - self._joined[worker])
        return [heard[rank] for rank in sorted(heard)]

    def _beat(self, worker: Worker, rank: int, size: int) -> HeartbeatState:
        since = self._progress[worker][1] if worker in self._progress else self._run.world.now
        return HeartbeatState(
            self._beats.group,
            rank,
            size,
            worker.process.host,
            "",
            0,
            max(0, worker.step),
            _activity(worker),
            0.0 if worker.phase == "asking" else self._run.world.now - since,  # who waits for the arbiter says so
            self._run.step_seconds,
        )

    def _examined(self, worker: Worker) -> HangEvidence:
        process = worker.process
        if process.host not in self._run.hosts or self._run.network.is_cut(process.host, HEAD):
            return HangEvidence.SILENT_NODE
        if not process.is_alive:
            return HangEvidence.GONE
        return HangEvidence.STOPPED if process.is_frozen else HangEvidence.IDLE

    def _check_finding(self, group: Sequence[Worker], finding: HangFinding) -> None:
        self._run.supervision.found_hang()
        blamed = [group[beat.rank] for beat in finding.beats]
        self._run.world.tell(f"{', '.join(worker.member.name for worker in blamed)}: {finding.text}")
        well = [w for w in blamed if w.process.is_alive and not is_hung(w) and not self._run.checks.is_troubled(w)]
        # Where one hangs in a step, nobody knows who it is; nor for a while after its host has disappeared.
        lately = self._run.world.now - BROKEN_SECONDS
        if well and not any(
            (is_hung(worker) and not worker.hangs_alone) or lately < worker.process.ended_at < self._run.world.now
            for worker in group
        ):
            raise Violation(f"{well[0].member.name} makes progress and is blamed for a hang: {finding.text}")
