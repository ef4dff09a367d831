"""Decides from heartbeats, evidence and time which rank makes no progress. Uses neither Ray nor TensorFlow.

Every rank sends a heartbeat with its activity once a second. A rank whose heartbeats stop is examined from outside
before it is blamed. A rank that sends heartbeats is blamed if its own work takes too long. A rank that only waits for
others is never blamed, unless all ranks wait. Ranks that wait for a rendezvous, because they join or have lost a peer,
do not excuse other ranks that wait.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from raytf.driver.supervision.liveness import ALL_SILENT_SECONDS
from raytf.training.process.heartbeat_types import USUAL, Activity, HangFinding, HeartbeatState, LastHeartbeat

#: A hang is declared after this share of the user's limit; the rest is for heartbeat, examination and message.
_EARLY = 0.85
#: Share of that time for which a rank may be silent before it is examined from outside.
_QUIET = 0.5
#: Seconds of silence after which a process that is known to be stopped is blamed; shorter stops are allowed.
_STOPPED_SECONDS = 5.0
#: After all ranks were silent for this many seconds, one heartbeat is enough to restart the clock of every rank.
_HELD_UP_SECONDS = 3.0
#: A call may take this many times its usual time, or the time of this many usual steps.
_CALLS, _STEPS = 3, 20
#: If more seconds pass between two checks, the watching process itself was delayed.
_GAP_SECONDS = 5.0
#: The limit grows to at most this many times its value if the same step hangs repeatedly.
_MOST_PATIENCE = 16.0
#: Factor of the limit after which ranks are blamed if all of them are silent at once.
_ALL_SILENT = 10.0
#: In these activities ranks wait for others.
_WAITING = frozenset({Activity.STEP, Activity.COLLECTIVE, Activity.TRANSFER, Activity.REPORT})
#: In these activities ranks may wait for a rendezvous; while they wait, they report progress repeatedly.
_MEETING = frozenset({Activity.START, Activity.TRANSFER})
#: Most seconds between two such reports, and seconds after which a rank certainly waits for a rendezvous.
_REPORT_SECONDS, _MEETING_SECONDS = 5.0, 10.0
#: Factors of the limit for activities without a usual length, and for callbacks.
_FACTOR, _CALLBACK_FACTOR = 20.0, 10.0
_IN_WORDS = {
    Activity.START: "stuck building the model or restoring a checkpoint",
    Activity.LOOP: "stuck between steps",
    Activity.TRACE: "stuck compiling its first step",
    Activity.INPUT: "stuck waiting for data",
    Activity.STEP: "stuck in a step",
    Activity.COLLECTIVE: "stuck in a collective",
    Activity.TRANSFER: "stuck sending weights",
    Activity.REPORT: "stuck reporting to Ray Train",
    Activity.VALIDATION: "stuck in validation",
    Activity.CALLBACK: "stuck in a callback",
    Activity.SAVE: "stuck saving a checkpoint",
    Activity.PARK: "stuck waiting for a change of the number of workers",
    Activity.END: "stuck in the test or the export",
}


class HangEvidence(enum.StrEnum):
    """The result of an examination on a rank's node."""

    STOPPED = "stopped"  # the process was stopped by a signal
    SILENT_NODE = "silent node"  # the node does not answer, even if it accepts a connection
    GONE = "gone"  # there is no such process
    NODE_GONE = "node gone"  # the node is dead, or refuses connections; Ray will report that
    BUSY = "busy"  # the process computes, or waits for a disk
    IDLE = "idle"  # the process is alive and does nothing


#: Evidence that a rank is frozen, in words.
FROZEN = {
    HangEvidence.STOPPED: "frozen (its process was stopped)",
    HangEvidence.SILENT_NODE: "its node does not answer",
}


class Heartbeats:
    """The latest heartbeat of each rank of the current group."""

    def __init__(self) -> None:
        self.group = 0
        self._latest: dict[int, tuple[HeartbeatState, float]] = {}

    def begin(self) -> int:
        """Start a new group, and return its number; heartbeats of older groups are ignored from now on."""
        self.group += 1
        self._latest = {}
        return self.group

    def hear(self, beat: HeartbeatState, now: float) -> None:
        """Record a heartbeat at a monotonic time, unless its rank is done or it belongs to another group."""
        before = self._latest.get(beat.rank)
        if beat.group == self.group and (before is None or before[0].activity is not Activity.DONE):
            self._latest[beat.rank] = beat, now

    def forget(self, ranks: Collection[int]) -> None:
        """Forget ranks that were reassigned to other workers."""
        self._latest = {rank: latest for rank, latest in self._latest.items() if rank not in ranks}

    def forgive(self, now: float) -> None:
        """Restart all ages at `now`, because no heartbeat could arrive before, through no fault of the ranks."""
        self._latest = {rank: (beat, now) for rank, (beat, _) in self._latest.items()}

    def sightings(self, now: float) -> list[LastHeartbeat]:
        """Return the latest heartbeats and their ages, by rank."""
        return [LastHeartbeat(beat, now - at) for _, (beat, at) in sorted(self._latest.items())]


@dataclass(frozen=True)
class HangReport:
    """The hang found in a group, if any, and the ranks that must be examined."""

    finding: HangFinding | None = None
    suspects: frozenset[int] = frozenset()


class HangDetector:
    """Decides from heartbeats which ranks hang.

    A rank that waits for data, computes or waits in a collective may take as long as `seconds`, 20 usual steps or three
    usual calls, whichever is longest. Activities without a usual length (compiling, callbacks, validation, saving,
    restoring) may take ten or twenty times `seconds` without progress. Each validation batch, for example, is progress.
    Each hang at the same step doubles the time for the steps up to it, so that a run gets past a source that really is
    that slow.

    Args:
        seconds: time within which to find a hang; 0 to never find one.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        #: Factor of the limit, for steps up to the one at which the run has hung.
        self._patience, self._hung_step = 1.0, -1
        self._step = 0
        self._looked_at: float | None = None
        self._forgiven_at = float("-inf")
        self._were_all_silent = False
        #: Rank and process id -> time since which the rank seems to wait for a rendezvous.
        self._meeting_since: dict[tuple[int, int], float] = {}

    @property
    def limit(self) -> float:
        """The seconds without progress that are allowed now if steps are short."""
        return self._seconds * _EARLY * (self._patience if self._step <= self._hung_step else 1.0)

    def allowed(self, beat: HeartbeatState) -> float:
        """Return the seconds that a rank may spend in its activity without progress."""
        if beat.activity in USUAL:
            return max(self.limit, max(_STEPS, _CALLS * beat.call_steps) * beat.step_seconds)
        return self.limit * (_CALLBACK_FACTOR if beat.activity is Activity.CALLBACK else _FACTOR)

    def judge(self, now: float, sightings: Sequence[LastHeartbeat], evidence: Mapping[int, HangEvidence]) -> HangReport:
        """Judge a group by its latest heartbeats, at the time `now` of a monotonic clock.

        Args:
            evidence: results, by rank, of the examinations that earlier reports requested.
        """
        if self._looked_at is None or now - self._looked_at > _GAP_SECONDS:
            self._forgiven_at = now  # this process was delayed, so heartbeats may have been delayed, too
        self._looked_at = now
        if not self._seconds:
            return HangReport()
        self._step = max((s.beat.step for s in sightings), default=0)
        there = [s for s in sightings if s.beat.activity is not Activity.DONE]
        members = self._members([s.beat for s in there], now)
        are_all_silent = min((s.age for s in there), default=0.0) > _HELD_UP_SECONDS
        if self._were_all_silent and not are_all_silent:
            self._forgiven_at = now
        self._were_all_silent = are_all_silent
        ages = {s.beat.rank: min(s.age, now - self._forgiven_at) for s in sightings}
        stopped = {s.beat.rank for s in there if evidence.get(s.beat.rank) is HangEvidence.STOPPED}
        quiet = self.limit * _QUIET
        nobody_waits = are_all_silent and len(stopped) == len(there)
        most = ALL_SILENT_SECONDS if nobody_waits else _STOPPED_SECONDS
        patience = {s.beat.rank: min(quiet, most) if s.beat.rank in stopped else quiet for s in there}
        silent = [s for s in there if ages[s.beat.rank] > patience[s.beat.rank]]
        if silent:
            frozen = self._frozen(silent, ages, evidence, len(silent) == len(there))
            return HangReport(frozen, frozenset() if frozen else frozenset(s.beat.rank for s in silent))
        return HangReport(self._stuck(members))

    def _members(self, beats: list[HeartbeatState], now: float) -> list[HeartbeatState]:
        """Return the heartbeats of the ranks that do not wait for a rendezvous."""
        meeting = [b for b in beats if b.activity in _MEETING and b.seconds < _REPORT_SECONDS]
        self._meeting_since = {(b.rank, b.pid): self._meeting_since.get((b.rank, b.pid), now) for b in meeting}
        return [b for b in beats if now - self._meeting_since.get((b.rank, b.pid), now) < _MEETING_SECONDS]

    def _frozen(
        self,
        silent: list[LastHeartbeat],
        ages: Mapping[int, float],
        evidence: Mapping[int, HangEvidence],
        all_silent: bool,
    ) -> HangFinding | None:
        blamed: list[HeartbeatState] = []
        texts: list[str] = []
        for beat in (s.beat for s in silent):
            seen, age = evidence.get(beat.rank), ages[beat.rank]
            match seen:
                case HangEvidence.STOPPED | HangEvidence.SILENT_NODE:
                    after, text = 0.0, FROZEN[seen]
                case HangEvidence.BUSY:
                    after, text = self.allowed(beat), "computes, but sends no heartbeats"
                case HangEvidence.IDLE:
                    after, text = self.limit, "is alive, but sends no heartbeats"
                case _:
                    after, text = self.limit, "sends no heartbeats"
            if all_silent and seen is not HangEvidence.STOPPED:
                # More likely, the driver's network or machine loses the heartbeats.
                after = max(after, self.limit * (2.0 if seen is HangEvidence.SILENT_NODE else _ALL_SILENT))
            if age > after:
                blamed.append(beat)
                texts.append(text)
        if not blamed:
            return None
        seconds = max(ages[b.rank] + b.seconds for b in blamed)
        finding = HangFinding(tuple(blamed), seconds, "frozen", texts[0])
        return finding if any(evidence.get(b.rank) in FROZEN for b in blamed) else self._remember(finding)

    def _stuck(self, beats: list[HeartbeatState]) -> HangFinding | None:
        late = [b for b in beats if b.seconds > self.allowed(b)]
        working = [b for b in late if b.activity not in _WAITING]
        if working:
            text = _IN_WORDS[working[0].activity]
            finding = HangFinding(tuple(working), max(b.seconds for b in working), working[0].activity.value, text)
        elif late and len(late) == len(beats):
            alone = len(beats) == 1
            text = _IN_WORDS[late[0].activity] if alone else "all workers wait for each other"
            finding = HangFinding(tuple(late), min(b.seconds for b in late), "step" if alone else "collective", text)
        else:
            return None
        return self._remember(finding)

    def _remember(self, finding: HangFinding) -> HangFinding:
        self._patience = min(2 * self._patience, _MOST_PATIENCE) if self._step <= self._hung_step else 2.0
        self._hung_step = max(self._hung_step, self._step)
        return finding


def blamed_for_loss(
    sightings: Collection[LastHeartbeat], answered: Collection[int], seconds: float
) -> list[HeartbeatState]:
    """Return the heartbeats of the ranks to examine after others have lost a peer: the ranks that have been silent for
    more than `seconds`, without the ranks in `answered`, whose error or death is known."""
    there = [s for s in sightings if s.beat.activity is not Activity.DONE]
    return [s.beat for s in there if s.beat.rank not in answered and s.age > seconds]
