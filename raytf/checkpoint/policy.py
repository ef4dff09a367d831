"""Decisions about checkpoints, as pure functions and a state machine: when to save, what to keep, what to restore."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

#: The cadence where the user gives none.
DEFAULT_EVERY_SECONDS = 30.0
#: A run of which nothing is on storage saves after so many seconds, and so does a group that went on from an earlier
#: one's state, and then each time it is twice as old.
YOUNG_SECONDS = 2.0
#: Of a step in a name.
_MOST_DIGITS = 15


@dataclass(frozen=True)
class Cadence:
    """When to save: after so many steps, so many seconds, or whichever comes first where both are given.

    It is the run's, not that of a group of workers: it counts from the newest state that is on storage, or on its way
    there. A run of which nothing is on storage saves at once; where a number of steps was asked for, after so many, but
    YOUNG_SECONDS after its first steps at the latest. After a restart another fault is likely soon, so that a group
    which went on from an earlier one's state also saves while it is young: were faults more frequent than the cadence,
    a run without memory would make the same steps for ever.
    """

    every_steps: int | None
    every_seconds: float | None

    @classmethod
    def of(cls, every_steps: int | None, every_seconds: float | None) -> Cadence:
        if every_steps is None and every_seconds is None:
            every_seconds = DEFAULT_EVERY_SECONDS
        return cls(every_steps, every_seconds)

    def is_due(
        self,
        step: int,
        now: float,
        saved_step: int | None,
        saved_at: float,
        restarted_at: float | None = None,
        takes: float = 0.0,
    ) -> bool:
        """Whether to save after `step`, at time `now`, in seconds.

        Args:
            saved_step: of the newest state on storage, or on its way there; None for none.
            saved_at: when the run was in that state; not before this group began. For none when its first steps ended.
            restarted_at: when this group began, where it went on from an earlier one's state.
            takes: seconds of a save, which is to end within the cadence.
        """
        if saved_step is None:
            return step >= (self.every_steps or 1) or (step > 0 and now - saved_at >= YOUNG_SECONDS)
        if step <= saved_step:
            return False
        age = now - saved_at
        by_steps = self.every_steps is not None and step // self.every_steps > saved_step // self.every_steps
        by_time = self.every_seconds is not None and age >= self.every_seconds - min(takes, self.every_seconds / 2)
        is_young = restarted_at is not None and age >= max(YOUNG_SECONDS, saved_at - restarted_at)
        return by_steps or by_time or is_young

    @property
    def most_pause(self) -> float:
        """The most seconds between two tries of a save that fails: storage that is back is used within a cadence."""
        return min(MOST_RETRY_SECONDS, max(DEFAULT_EVERY_SECONDS, self.every_seconds or 0.0))


#: Seconds to the first new try after a save that failed, and the most between two tries.
RETRY_SECONDS, MOST_RETRY_SECONDS = 5.0, 300.0
#: A save may take so long, or so many times as long as the last good one.
DEADLINE_SECONDS, DEADLINE_FACTOR = 120.0, 10.0


def deadline(good_seconds: float) -> float:
    """Seconds after which a save is given up, when the last good one took `good_seconds`; 0 for none yet."""
    return max(DEADLINE_SECONDS, DEADLINE_FACTOR * good_seconds)


def retry_pause(failures: int, chance: float, most: float = MOST_RETRY_SECONDS) -> float:
    """Seconds to the next try after so many failures in a row: doubled with each, half of it by chance ("equal jitter",
    M. Brooker, Exponential Backoff and Jitter, AWS Architecture Blog, 2015).

    Args:
        failures: 1 or more.
        chance: in [0, 1).
        most: seconds.
    """
    return min(most, RETRY_SECONDS * 2.0 ** min(failures - 1, 32)) * (1 + chance) / 2


class Outage:
    """Saves that failed in a row, and when to try again.

    Args:
        random: numbers in [0, 1).
        most: seconds between two tries.

    Attributes:
        failures: in a row.
        since: time of the first, in seconds.
        retry_at: time of the next try.
        why: the last failed.
    """

    def __init__(self, random: Callable[[], float], most: float = MOST_RETRY_SECONDS):
        self._random, self._most = random, most
        self.failures, self.since, self.retry_at, self.why = 0, 0.0, float("-inf"), ""

    def fail(self, now: float, why: str) -> None:
        if not self.failures:
            self.since = now
        self.failures += 1
        self.retry_at, self.why = now + retry_pause(self.failures, self._random(), self._most), why

    def end(self) -> None:
        """A save is complete."""
        self.failures, self.retry_at = 0, float("-inf")

    def allows(self, now: float, due: bool) -> bool:
        """Whether to save at time `now`: where the last try failed, not sooner than `retry_at`, and then due or not."""
        return now >= self.retry_at if self.failures else due


class Phase(enum.Enum):
    IDLE = "idle"
    WRITING = "writing"  # every rank writes its share
    COMMITTING = "committing"  # rank 0 writes the manifest


@dataclass(frozen=True)
class Votes:
    """What all ranks together said about the save under way: sums over ranks, equal on every rank."""

    want: float = 0
    written: float = 0
    committed: float = 0
    failed: float = 0


class Event(enum.Enum):
    NOTHING = "nothing"
    BEGIN = "begin"  # write your share of the state as it is now
    COMMIT = "commit"  # all shares are there: rank 0 writes the manifest
    DONE = "done"  # the checkpoint can be restored
    FAILED = "failed"  # given up; training goes on


def advance(phase: Phase, votes: Votes, world_size: int) -> tuple[Phase, Event]:
    """The next phase of a save. Every rank sees the same votes, so every rank takes the same way."""
    if phase is Phase.IDLE:
        return (Phase.WRITING, Event.BEGIN) if votes.want else (phase, Event.NOTHING)
    if votes.failed:
        return Phase.IDLE, Event.FAILED
    if phase is Phase.WRITING and votes.written >= world_size:
        return Phase.COMMITTING, Event.COMMIT
    if phase is Phase.COMMITTING and votes.committed:
        return Phase.IDLE, Event.DONE
    return phase, Event.NOTHING


def restore_order(complete: Collection[str]) -> list[str]:
    """Names of complete checkpoints, best to restore first: the latest step, then the latest attempt."""
    return sorted(complete, key=split_name, reverse=True)


def to_delete(
    names: Collection[str],
    complete: Collection[str],
    keep: int,
    attempt: str,
    damaged: Collection[str] = (),
    needed: Collection[str] = (),
    over: Collection[str] = (),
    writing: Collection[str] = (),
) -> list[str]:
    """Checkpoints that may go: all complete ones but the newest `keep`, and unfinished ones that nobody writes.

    Damaged ones go first and count for nothing; needed ones (just written, restored from, the best) stay whatever their
    step. Where no good one is left, all stay.

    An unfinished one is nobody's when its attempt is over, or when it is older than the newest complete one and of
    another attempt.

    Args:
        names: all folders.
        complete: those with a manifest.
        keep: how many complete ones stay.
        attempt: the present one.
        damaged: complete ones that cannot be restored.
        needed: complete ones that stay.
        over: attempts whose unfinished saves are not written any more, whatever their step.
        writing: unfinished ones that are being written all the same.
    """
    newest_first = restore_order(set(complete) - set(damaged))
    if not newest_first:
        return []
    surplus = [n for n in newest_first[max(1, keep) :] if n not in needed]
    surplus += [n for n in damaged if n in complete]
    unfinished = set(names) - set(complete)
    orphans = [
        n
        for n in unfinished - set(writing)
        if split_name(n)[0] >= 0
        and (attempt_of(n) in over or (n < newest_first[0] and not split_name(n)[1].startswith(attempt)))
    ]
    return sorted([*surplus, *orphans])


def name_of(step: int, attempt: str, serial: int = 0) -> str:
    """The folder of the serial-th save of an attempt; names sort by step, and no two saves share one."""
    return f"{step:012d}-{attempt}-{serial:04d}"


def split_name(name: str) -> tuple[int, str]:
    """(step, attempt) of a checkpoint's folder; (-1, name) where it is none."""
    step, mark, attempt = name.partition("-")
    # Of other alphabets' digits int() takes some and refuses others; no run has steps of more than so many.
    is_step = step.isascii() and step.isdecimal() and len(step) <= _MOST_DIGITS
    return (int(step), attempt) if mark and is_step else (-1, name)


def attempt_of(name: str) -> str:
    """The attempt that wrote a checkpoint's folder."""
    return split_name(name)[1].rpartition("-")[0]


@dataclass(frozen=True)
class Share:
    """One rank's share of a snapshot in memory.

    Attributes:
        step: global steps that the state has seen.
        attempt: name of the start of the worker group that wrote it.
        share, shares: which part of how many the ranks of its node wrote.
        bytes: that it takes.
    """

    step: int
    attempt: str
    share: int
    shares: int
    bytes: int = 0


@dataclass(frozen=True)
class Held(Share):
    """A share that a node holds, and the path under which processes of that node find it."""

    path: str = ""


@dataclass(frozen=True)
class Generation:
    """A snapshot that at least one node holds whole.

    Attributes:
        holders: node -> its shares, in order.
    """

    step: int
    attempt: str
    holders: dict[str, list[Held]]


def generations(found: Mapping[str, Collection[Held]], attempts: Collection[str] | None) -> list[Generation]:
    """Snapshots in memory that can be restored, best first: the latest step, then the latest attempt.

    Args:
        found: what each node holds.
        attempts: those of this run, where it is known; what others wrote is of a run that was deleted.
    """
    whole: dict[tuple[int, str], dict[str, list[Held]]] = {}
    for node, held in found.items():
        for key in {(h.step, h.attempt) for h in held}:
            shares = {h.share: h for h in held if (h.step, h.attempt) == key}  # both slots of a rank may hold one
            own = sorted(shares.values(), key=lambda h: h.share)
            if [h.share for h in own] == list(range(own[0].shares)) and (attempts is None or key[1] in attempts):
                whole.setdefault(key, {})[node] = own
    return [Generation(step, attempt, holders) for (step, attempt), holders in sorted(whole.items(), reverse=True)]


def is_latest(found: Mapping[str, Collection[Held]], attempts: Collection[str]) -> bool:
    """Whether some nodes' answers make it needless to wait for others: they hold a whole copy of the latest attempt.

    All nodes of an attempt copy after the same steps, so another one can have one copy more at most, of a few steps.
    Names of attempts begin with their time.
    """
    return any(g.attempt == max(attempts) for g in generations(found, attempts))


def candidates(found: Collection[Generation], complete: Collection[str]) -> list[Generation | str]:
    """Snapshots in memory and names of checkpoints on storage, best to restore first: the latest step, whatever becomes
    of those before it; of equal steps the one in memory.

    Args:
        found: what `generations` returned.
        complete: names of checkpoints.
    """
    both: list[tuple[int, int, Generation | str]] = [(g.step, 1, g) for g in found]
    both += [(split_name(name)[0], 0, name) for name in restore_order(complete)]
    return [one for _, _, one in sorted(both, key=lambda entry: entry[:2], reverse=True)]


#: Share of the run time that snapshots in memory may cost, where their cadence is chosen by itself.
SNAPSHOT_SHARE = 0.008
#: The cadence as long as that cost is not known.
SNAPSHOT_STEPS = 10


def snapshot_every(asked: int | None, copy_seconds: float, step_seconds: float) -> int:
    """Steps between two snapshots in memory; 0 for none.

    Args:
        asked: by the user; None chooses it so that copying takes at most SNAPSHOT_SHARE of the time.
        copy_seconds: that one snapshot holds training up; 0 where it is not known yet.
        step_seconds: of one step; likewise.
    """
    if asked is not None:
        return asked
    if not (copy_seconds and step_seconds):
        return SNAPSHOT_STEPS
    return max(1, math.ceil(copy_seconds / (SNAPSHOT_SHARE * step_seconds)))
