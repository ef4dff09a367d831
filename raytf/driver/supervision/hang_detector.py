"""Decide from heartbeats, evidence and time which rank makes no progress. No Ray and no TensorFlow here.

Every rank sends a heartbeat once a second that says what it does. A rank whose heartbeats stop is examined from outside
before it is blamed. Among ranks with heartbeats, one whose own work takes too long is to blame; ranks that only wait
for others never are, unless all of them wait. Ranks that wait to meet the others, since they join or have lost one, are
no reason for the others to wait.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from raytf.driver.supervision.liveness import ALL_SILENT_SECONDS
from raytf.training.process.heartbeat_types import USUAL, Activity, HangFinding, HeartbeatState, LastHeartbeat

#: Share of the user's limit after which a hang is found, which leaves time for heartbeat, examination and message.
_EARLY = 0.85
#: Share of that: silence after which a rank is examined from outside.
_QUIET = 0.5
#: Seconds of silence after which a process that is known to be stopped is blamed; a short stop is allowed.
_STOPPED_SECONDS = 5.0
#: Seconds of silence of all ranks after which the first one that is heard speaks for the others: what held them up is
#: over.
_HELD_UP_SECONDS = 3.0
#: A call may take this many times its usual length, or this many usual steps.
_CALLS, _STEPS = 3, 20
#: Seconds between two looks from which on the watching process itself must have been held up.
_GAP_SECONDS = 5.0
#: The limit grows at most this many times if the same step hangs again and again.
_MOST_PATIENCE = 16.0
#: Factor of the limit: when all ranks are silent at once, they are only blamed after this time.
_ALL_SILENT = 10.0
#: In these activities ranks wait for others.
_WAITING = frozenset({Activity.STEP, Activity.COLLECTIVE, Activity.TRANSFER, Activity.REPORT})
#: In these activities ranks wait to meet the others, and then they report progress again and again.
_MEETING = frozenset({Activity.START, Activity.TRANSFER})
#: The most seconds between two such reports, and seconds after which it is certain that a rank waits to meet.
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
    Activity.REPORT: "stuck telling Ray Train",
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
    BUSY = "busy"  # it computes, or waits for a disk
    IDLE = "idle"  # it is alive and does nothing


#: Evidence that a rank is frozen, in words.
FROZEN = {
    HangEvidence.STOPPED: "frozen (its process was stopped)",
    HangEvidence.SILENT_NODE: "its node does not answer",
}


class Heartbeats:
    """The latest heartbeat of each rank of the present group."""

    def __init__(self) -> None:
        self.group = 0
        self._latest: dict[int, tuple[HeartbeatState, float]] = {}

    def begin(self) -> int:
        """Start a new group, and return its number; heartbeats of older groups are ignored from now on."""
        self.group += 1
        self._latest = {}
        return self.group

    def hear(self, beat: HeartbeatState, now: float) -> None:
        """Take a heartbeat, at a time of a clock that only goes forward. Those after a rank's last one are ignored."""
        before = self._latest.get(beat.rank)
        if beat.group == self.group and (before is None or before[0].activity is not Activity.DONE):
            self._latest[beat.rank] = beat, now

    def forget(self, ranks: Collection[int]) -> None:
        """Forget ranks that other workers have now."""
        self._latest = {rank: latest for rank, latest in self._latest.items() if rank not in ranks}

    def forgive(self, now: float) -> None:
        """Do not count the time until now as silence: no heartbeats could arrive, through no fault of the ranks."""
        self._latest = {rank: (beat, now) for rank, (beat, _) in self._latest.items()}

    def sightings(self, now: float) -> list[LastHeartbeat]:
        """Return the latest heartbeats and their ages, by rank."""
        return [LastHeartbeat(beat, now - at) for _, (beat, at) in sorted(self._latest.items())]


@dataclass(frozen=True)
class HangReport:
    """Who hangs in a group, if anyone, and which ranks must be examined."""

    finding: HangFinding | None = None
    suspects: frozenset[int] = frozenset()


class HangDetector:
    """Decides from heartbeats who hangs.

    A rank that waits for data, computes or waits in a collective may take as long as `seconds`, 20 usual steps or three
    usual calls, whichever is longest. Activities without a usual length (compiling, callbacks, validation, saving,
    restoring) may take ten or twenty times `seconds` without progress, such as a batch of the validation. If a step
    hangs at which the run has hung before, it gets twice the time: otherwise a run would never get past a source that
    really is that slow.

    Args:
        seconds: within which a hang is found; 0 to never find one.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        #: Factor of the limit, for steps up to the one at which the run has hung.
        self._patience, self._hung_step = 1.0, -1
        self._step = 0
        self._looked_at: float | None = None
        self._forgiven_at = float("-inf")
        self._were_all_silent = False
        #: Rank and process id -> since when the rank seems to wait to meet the others.
        self._meeting_since: dict[tuple[int, int], float] = {}

    @property
    def limit(self) -> float:
        """Return the seconds without progress that are allowed now if steps are short."""
        return self._seconds * _EARLY * (self._patience if self._step <= self._hung_step else 1.0)

    def allowed(self, beat: HeartbeatState) -> float:
        """Return the seconds that a rank may spend in its activity without progress."""
        if beat.activity in USUAL:
            return max(self.limit, max(_STEPS, _CALLS * beat.call_steps) * beat.step_seconds)
        return self.limit * (_CALLBACK_FACTOR if beat.activity is Activity.CALLBACK else _FACTOR)

    def judge(self, now: float, sightings: Sequence[LastHeartbeat], evidence: Mapping[int, HangEvidence]) -> HangReport:
        """Judge a group by its latest heartbeats, at a time of any clock that only goes forward.

        Args:
            evidence: by rank, the results of examinations that an earlier report asked for.
        """
        if self._looked_at is None or now - self._looked_at > _GAP_SECONDS:
            self._forgiven_at = now  # this process was held up, so heartbeats may have been, too
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
        """Return the heartbeats of the ranks that do not wait to meet the others."""
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
                # More likely the driver's network or machine loses the heartbeats.
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
    """Return the ranks to examine when the others have lost a peer: their error or death is not known (`answered`), and
    they have sent no heartbeat for so many seconds."""
    there = [s for s in sightings if s.beat.activity is not Activity.DONE]
    return [s.beat for s in there if s.beat.rank not in answered and s.age > seconds]
