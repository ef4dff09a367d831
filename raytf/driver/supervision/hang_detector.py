"""Which rank makes no progress: a decision of beats, evidence and time alone. No Ray and no TensorFlow here.

Every rank beats once a second and says what it does. A rank that beats no more is looked at from outside before it is
blamed. Among those that beat, work that takes too long is to blame; ranks that only wait for others never are, unless
all of them wait.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from raytf.training.beat import USUAL, Activity, HangFinding, HeartbeatState, LastHeartbeat

#: Of the user's limit: what is over then leaves time for the beat, the look and the message.
_EARLY = 0.85


#: Of that: silence after which a rank is looked at from outside.
_QUIET = 0.5


#: Silence after which one that is known to be stopped is blamed; somebody may stop a process for a moment.
_STOPPED_SECONDS = 5.0


#: Calls of the usual length that a call may take, and steps.
_CALLS, _STEPS = 3, 20


#: Seconds between two looks after which it is the one who looks that was held up.
_GAP_SECONDS = 5.0


#: Most that the limit grows where the same step hangs again and again.
_MOST_PATIENCE = 16.0


#: Of the limit: silence of all ranks at once after which they are blamed all the same.
_ALL_SILENT = 10.0


#: Ranks there wait for others.
_WAITING = frozenset({Activity.STEP, Activity.COLLECTIVE, Activity.TRANSFER, Activity.REPORT})


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
    """What is found on a rank's node."""

    STOPPED = "stopped"  # the process was stopped by a signal
    SILENT_NODE = "silent node"  # the node takes a connection, or not even that, and says nothing
    GONE = "gone"  # there is no such process, or the node refuses connections; Ray will tell
    BUSY = "busy"  # it computes, or waits for a disk
    IDLE = "idle"  # it lives and does nothing


class Heartbeats:
    """The latest beat of each rank of the present group."""

    def __init__(self) -> None:
        self.group = 0
        self._latest: dict[int, tuple[HeartbeatState, float]] = {}

    def begin(self) -> int:
        """A new group starts, and what is heard of older ones from now on is void; its number."""
        self.group += 1
        self._latest = {}
        return self.group

    def hear(self, beat: HeartbeatState, now: float) -> None:
        """A beat comes, at a time of a clock that only goes forward; after a rank's last word only one that is late."""
        before = self._latest.get(beat.rank)
        if beat.group == self.group and (before is None or before[0].activity is not Activity.DONE):
            self._latest[beat.rank] = beat, now

    def forgive(self, now: float) -> None:
        """Nobody could be heard until now, which is not the ranks' fault."""
        self._latest = {rank: (beat, now) for rank, (beat, _) in self._latest.items()}

    def sightings(self, now: float) -> list[LastHeartbeat]:
        """By rank."""
        return [LastHeartbeat(beat, now - at) for _, (beat, at) in sorted(self._latest.items())]


@dataclass(frozen=True)
class HangReport:
    """A look at a group: who hangs, if anyone; and ranks of which evidence is wanted."""

    finding: HangFinding | None = None
    suspects: frozenset[int] = frozenset()


class HangDetector:
    """Decides from beats who hangs.

    A rank that waits for data, computes or waits in a collective may take as long as `seconds`, 20 usual steps or three
    usual calls, whichever is most. What has no usual length (compiling, callbacks, validation, saving, restoring) has
    ten or twenty times `seconds`, without anything that counts as progress, such as a batch of the validation. Where a
    step hangs at which the run has hung before, it is given twice the time, since a source that really is that slow
    would else never be got over.

    Args:
        seconds: within which a hang is found; 0 never finds one.
    """

    def __init__(self, seconds: float):
        self._seconds = seconds
        #: Of the limit, for steps up to the one at which the run has hung.
        self._patience, self._hung_step = 1.0, -1
        self._step = 0
        self._looked_at: float | None = None
        self._forgiven_at = float("-inf")

    @property
    def limit(self) -> float:
        """Seconds without progress that are let pass now, where steps are short."""
        return self._seconds * _EARLY * (self._patience if self._step <= self._hung_step else 1.0)

    def allowed(self, beat: HeartbeatState) -> float:
        """Seconds that a rank may spend without progress in what it does."""
        if beat.activity in USUAL:
            return max(self.limit, max(_STEPS, _CALLS * beat.call_steps) * beat.step_seconds)
        return self.limit * (_CALLBACK_FACTOR if beat.activity is Activity.CALLBACK else _FACTOR)

    def look(self, now: float, sightings: Sequence[LastHeartbeat], evidence: Mapping[int, HangEvidence]) -> HangReport:
        """Judge a group.

        Args:
            now: seconds, of any clock that only goes forward.
            sightings: of the ranks of one group.
            evidence: what was found where a rank was looked at because of an earlier answer; by rank.
        """
        if self._looked_at is None or now - self._looked_at > _GAP_SECONDS:
            self._forgiven_at = now  # whoever looks was held up, and so may have been the beats
        self._looked_at = now
        if not self._seconds:
            return HangReport()
        self._step = max((s.beat.step for s in sightings), default=0)
        ages = {s.beat.rank: min(s.age, now - self._forgiven_at) for s in sightings}
        there = [s for s in sightings if s.beat.activity is not Activity.DONE]
        stopped = {s.beat.rank for s in there if evidence.get(s.beat.rank) is HangEvidence.STOPPED}
        quiet = self.limit * _QUIET
        patience = {s.beat.rank: min(quiet, _STOPPED_SECONDS) if s.beat.rank in stopped else quiet for s in there}
        silent = [s for s in there if ages[s.beat.rank] > patience[s.beat.rank]]
        if silent:
            frozen = self._frozen(silent, ages, evidence, len(silent) == len(there))
            return HangReport(frozen, frozenset() if frozen else frozenset(s.beat.rank for s in silent))
        return HangReport(self._stuck([s.beat for s in there]))

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
            found, age = evidence.get(beat.rank), ages[beat.rank]
            match found:
                case HangEvidence.STOPPED:
                    after, text = 0.0, "frozen (its process was stopped)"
                case HangEvidence.SILENT_NODE:
                    after, text = 0.0, "its node does not answer"
                case HangEvidence.BUSY:
                    after, text = self.allowed(beat), "computes without a sign of life"
                case HangEvidence.IDLE:
                    after, text = self.limit, "lives without a sign of life"
                case _:
                    after, text = self.limit, "gives no sign of life"
            if all_silent and found is not HangEvidence.STOPPED:
                # Rather nobody hears them: the network of the driver, or its machine.
                after = max(after, self.limit * (2.0 if found is HangEvidence.SILENT_NODE else _ALL_SILENT))
            if age > after:
                blamed.append(beat)
                texts.append(text)
        if not blamed:
            return None
        seconds = max(ages[b.rank] + b.seconds for b in blamed)
        finding = HangFinding(tuple(blamed), seconds, "frozen", texts[0])
        is_certain = any(evidence.get(b.rank) in (HangEvidence.STOPPED, HangEvidence.SILENT_NODE) for b in blamed)
        return finding if is_certain else self._remember(finding)

    def _stuck(self, beats: list[HeartbeatState]) -> HangFinding | None:
        late = [b for b in beats if b.seconds > self.allowed(b)]
        working = [b for b in late if b.activity not in _WAITING]
        if working:
            text = _IN_WORDS[working[0].activity]
            found = HangFinding(tuple(working), max(b.seconds for b in working), working[0].activity.value, text)
        elif late and len(late) == len(beats):
            alone = len(beats) == 1
            text = _IN_WORDS[late[0].activity] if alone else "all workers wait for each other"
            found = HangFinding(tuple(late), min(b.seconds for b in late), "step" if alone else "collective", text)
        else:
            return None
        return self._remember(found)

    def _remember(self, found: HangFinding) -> HangFinding:
        self._patience = min(2 * self._patience, _MOST_PATIENCE) if self._step <= self._hung_step else 2.0
        self._hung_step = max(self._hung_step, self._step)
        return found


def blamed_for_loss(
    sightings: Collection[LastHeartbeat], answered: Collection[int], seconds: float
) -> list[HeartbeatState]:
    """Ranks to look at when the others have lost a peer: those that neither said so nor beat in the last seconds.

    Args:
        answered: ranks of which something is known: an error of theirs, or their death.
        seconds: of silence.
    """
    there = [s for s in sightings if s.beat.activity is not Activity.DONE]
    return [s.beat for s in there if s.beat.rank not in answered and s.age > seconds]
