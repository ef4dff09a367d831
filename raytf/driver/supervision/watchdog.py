"""Watches a worker group from Ray Train's controller, reports slow and hanging ranks, and ends a group that hangs."""

from __future__ import annotations

import bisect
import contextlib
import re
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.train import WorkerGroupError

from raytf._ray import state
from raytf.driver.supervision.hang_detector import FROZEN, HangDetector, HangEvidence, blamed_for_loss
from raytf.driver.supervision.inspection import Inspector, RankInspection, end, seen_here
from raytf.errors import HangError, StorageError
from raytf.runs import events
from raytf.storage.storage import Storage
from raytf.training.process.heartbeat_types import Activity, HangFinding, HeartbeatState, LastHeartbeat
from raytf.training.process.monitor_client import MonitorClient, Question

#: Seconds between two requests for the heartbeats.
_ASK_SECONDS = 1.0
#: Seconds between two examinations.
_EXAMINE_SECONDS = 5.0
#: Seconds to wait for the stacks of all ranks.
_STACKS_SECONDS = 10.0
#: Seconds of silence after which a rank is examined.
_LOSS_SILENCE_SECONDS = 3.0
#: Seconds that this examination may take.
_LOSS_SECONDS = 8.0
#: Seconds to wait for the stacks of blamed ranks that are stopped; the stacks of other ranks are not awaited then.
_STOPPED_STACKS_SECONDS = 4.0
#: Characters of a rank's stacks in an event, and frames in a message.
_EVENT_CHARACTERS, _FRAMES = 8000, 4
#: States in which a process does not end in time when Ray Train asks it to, but can be killed.
_KILLABLE = (HangEvidence.STOPPED, HangEvidence.IDLE, HangEvidence.BUSY)
#: Libraries whose frames are of little use to users.
_LIBRARIES = ("tensorflow", "keras", "ray", "concurrent")
FOLDER = "hangs"
_GONE = "The worker's process is gone, but a process that it forked, such as a data loader, still runs."
#: Seconds before the first inspection of workers that start.
_FIRST_SECONDS = 10.0
#: Seconds between two such inspections; a worker is ended if two in a row find it stopped.
_LOOK_SECONDS = 5.0
#: Name of Ray Train's worker class.
_WORKER = "RayTrainWorker"
#: A rank is slow at `SLOW` times the median of its peers or more, and has recovered below `RECOVERED` times.
SLOW, RECOVERED = 1.5, 1.25
#: Number of measurements that are averaged, after dropping the longest.
_WINDOW = 6
#: Number of measurements before ranks are compared.
_LEAST = 4
#: Number of times in a row that a rank must be slow before it is reported.
_PERSISTENT = 3


@dataclass(frozen=True)
class Straggler:
    """A rank that is slow: `ratio` is its seconds for a shard, divided by the median of its peers."""

    rank: int
    node: str
    address: str
    ratio: float


class Stragglers:
    """Finds slow ranks of one worker group, and restarts when the ranks or their worker processes change.

    All ranks wait for the slowest rank in each step, so step times do not show which rank is slow. From time to time,
    all ranks therefore measure how long each takes to compute one logical shard and to wait for its records.
    """

    def __init__(self) -> None:
        self._before: dict[int, HeartbeatState] = {}
        self._costs: dict[int, deque[float]] = {}
        self._slow: dict[int, int] = {}
        self._named: set[int] = set()

    def find_new(self, beats: Sequence[HeartbeatState]) -> list[Straggler]:
        """Return the ranks that have become slow, by the latest heartbeat of each rank."""
        if len(beats) < 2 or len(beats) < beats[0].world_size:
            return []
        before = self._before
        if {(b.rank, b.node, b.pid) for b in before.values()} != {(b.rank, b.node, b.pid) for b in beats}:
            self._before = {b.rank: b for b in beats}
            self._costs, self._slow, self._named = {}, {}, set()
            return []
        if not all(b.probes > before[b.rank].probes for b in beats):
            return []
        for beat in beats:
            costs = self._costs.setdefault(beat.rank, deque(maxlen=_WINDOW))
            costs.append(_shard_seconds(before[beat.rank], beat))
        self._before = {b.rank: b for b in beats}
        if len(self._costs[beats[0].rank]) < _LEAST:
            return []
        stragglers = []
        usual = {rank: (sum(costs) - max(costs)) / (len(costs) - 1) for rank, costs in self._costs.items()}
        in_order = sorted(usual.values())
        for beat in beats:
            peers = _median_without(in_order, usual[beat.rank])
            ratio = usual[beat.rank] / peers if peers else 1.0
            self._slow[beat.rank] = self._slow.get(beat.rank, 0) + 1 if ratio >= SLOW else 0
            if ratio < RECOVERED:
                self._named.discard(beat.rank)
            if self._slow[beat.rank] >= _PERSISTENT and beat.rank not in self._named:
                self._named.add(beat.rank)
                stragglers.append(Straggler(beat.rank, beat.node, beat.address, ratio))
        return stragglers


def _median_without(in_order: Sequence[float], one: float) -> float:
    left, place = len(in_order) - 1, bisect.bisect_left(in_order, one)

    def at(i: int) -> float:
        return in_order[i if i < place else i + 1]

    return at(left // 2) if left % 2 else (at(left // 2 - 1) + at(left // 2)) / 2


def _shard_seconds(before: HeartbeatState, beat: HeartbeatState) -> float:
    """Return the seconds that a rank needs for one shard, to compute it and to wait for its records."""
    computing = (beat.probe_seconds - before.probe_seconds) / (beat.probes - before.probes)
    steps = beat.step - before.step
    waiting = (beat.input_seconds - before.input_seconds) / (steps * beat.shards) if steps > 0 else 0.0
    return computing + waiting


@dataclass
class _Group:
    """State of the current group; times are those of `time.monotonic`."""

    began: float
    #: Time at which a rank's worker joined, for workers that joined after `began`.
    joined: dict[int, float] = field(default_factory=dict)
    question: Question[list[LastHeartbeat]] | None = None
    asked_at: float = float("-inf")
    sightings: list[LastHeartbeat] = field(default_factory=list)
    evidence: dict[int, HangEvidence] = field(default_factory=dict)
    examination: Inspector | None = None
    examined_at: float = float("-inf")
    finding: HangFinding | None = None
    found_at: float = float("-inf")
    stragglers: Stragglers = field(default_factory=Stragglers)


class Watchdog:
    """Watches the worker groups of a run, and writes the stacks of a group that hangs to the run's folder.

    Args:
        seconds: time within which to find a hang; 0 to never find one.
    """

    def __init__(self, monitor: MonitorClient, run: str, seconds: float):
        self._monitor, self._run = monitor, run
        self._seconds, self._detector = seconds, HangDetector(seconds)
        self._group = _Group(time.monotonic())
        self._guard: StartGuard | None = None
        self._number = 0

    def begin(self) -> None:
        """Start watching a new group; call this before its workers start."""
        self.over()
        self._number = self._monitor.begin_group(30)
        self._group = _Group(time.monotonic())
        if self._seconds:
            self._guard = StartGuard(self._monitor, self._run, self._number)

    @contextlib.contextmanager
    def guarding(self) -> Iterator[None]:
        """End workers that are stopped while they join a running group; Ray Train's controller waits for them."""
        guard = StartGuard(self._monitor, self._run, self._number) if self._seconds else None
        try:
            yield
        finally:
            if guard is not None:
                guard.over()

    def joined(self, ranks: Collection[int]) -> None:
        """Forget the state of ranks that were reassigned to other workers."""
        now = time.monotonic()
        self._group.joined |= dict.fromkeys(ranks, now)
        self._group.sightings = [s for s in self._group.sightings if s.beat.rank not in ranks]
        self._group.question = self._group.examination = self._group.finding = None
        self._group.evidence = {}

    def over(self) -> None:
        """Stop guarding the start, because the group has started or failed to start."""
        if self._guard is not None:
            self._guard.over()
            self._guard = None

    def poll(self, workers: Sequence[Any]) -> list[Straggler]:
        """Check a running group, without waiting, and return its new stragglers.

        Args:
            workers: Ray Train's workers, in order of rank.

        Raises:
            WorkerGroupError: a rank hangs, so the group must end; contains a HangError for each rank to blame. Also
                raised if processes of ranks are gone and Ray has not noticed yet.
        """
        self.over()
        now, group = time.monotonic(), self._group
        if group.finding is not None:
            assert group.examination is not None
            inspections = group.examination.collect()
            is_over = group.examination.is_complete or now - group.found_at >= _STACKS_SECONDS
            if is_over or _is_enough(group.finding.beats, inspections, now - group.found_at):
                raise conclude(self._monitor, self._run, group.finding, inspections)
            return []
        if not self._hear(now):
            return []
        sightings = self._with_the_unheard(workers, now)
        if group.examination is not None:
            inspections = group.examination.collect()
            group.evidence = {rank: about.evidence for rank, about in inspections.items() if about.evidence is not None}
        quiet = quiet_ranks(sightings)
        seen = group.evidence | seen_here(quiet)
        gone = [beat.rank for beat in quiet if seen.get(beat.rank) is HangEvidence.GONE]
        if gone:
            # Ray notices a death by a closed connection, which forked children of the process keep open.
            raise WorkerGroupError("worker processes are gone", {rank: RayActorError(error_msg=_GONE) for rank in gone})
        report = self._detector.judge(now, sightings, seen)
        if report.finding is not None:
            group.finding, group.found_at = report.finding, now
            _blame(self._monitor, report.finding)
            group.examination = Inspector(self._run, [s.beat for s in sightings])
        elif not quiet and not report.suspects:
            group.examination, group.evidence = None, {}
        elif group.examination is None or now - group.examined_at >= _EXAMINE_SECONDS:
            suspects = [s.beat for s in sightings if s.beat in quiet or s.beat.rank in report.suspects]
            group.examination, group.examined_at = Inspector(self._run, suspects, has_stacks=False), now
        stragglers = group.stragglers.find_new([s.beat for s in sightings])
        for slow in stragglers:
            text = f"is slow: it takes {slow.ratio:.1f} times as long as its peers"
            self._monitor.say(f"rank {slow.rank} on node {slow.address} {text}")
            self._monitor.book(events.Slow(slow.rank, slow.node, slow.ratio))
        return stragglers

    def _hear(self, now: float) -> bool:
        """Request heartbeats once a second, and return whether new ones have arrived."""
        group = self._group
        if group.question is None:
            if now - group.asked_at >= _ASK_SECONDS:
                group.question, group.asked_at = self._monitor.ask_sightings(), now
            return False
        if not group.question.is_answered():
            return False
        question, group.question = group.question, None
        try:
            group.sightings = question.answer()
        except ray.exceptions.RayError:
            return False
        return True

    def _with_the_unheard(self, workers: Sequence[Any], now: float) -> list[LastHeartbeat]:
        heard = {s.beat.rank: s for s in self._group.sightings}
        for rank, worker in enumerate(workers):
            if rank not in heard:
                at = worker.metadata
                beat = HeartbeatState(0, rank, len(workers), at.node_id, at.node_ip, at.pid)
                heard[rank] = LastHeartbeat(beat, now - self._group.joined.get(rank, self._group.began))
        return [heard[rank] for rank in sorted(heard)]


def quiet_ranks(sightings: Sequence[LastHeartbeat]) -> list[HeartbeatState]:
    """Return the ranks that are not done yet and have sent no heartbeat for some seconds."""
    there = [s for s in sightings if s.beat.activity is not Activity.DONE]
    return [s.beat for s in there if s.age > _LOSS_SILENCE_SECONDS]


def explain_loss(monitor: MonitorClient, run: str, answered: Sequence[int]) -> WorkerGroupError | None:
    """Return the error to raise if a rank is frozen while the others report the loss of a peer; may take seconds.

    Args:
        answered: ranks whose error or death is known.
    """
    sightings, known = monitor.sightings(5), monitor.blamed(5)
    if known is not None:  # the watchdog was about to end the group, but the peers were faster
        return conclude(monitor, run, known, Inspector(run, [s.beat for s in sightings]).collect(_LOSS_SECONDS))
    suspects = blamed_for_loss(sightings, answered, _LOSS_SILENCE_SECONDS)
    if not suspects:
        return None
    began, examination = time.monotonic(), Inspector(run, [s.beat for s in sightings])
    is_over = False
    while not is_over:
        inspections = examination.collect(0.2)
        blamed = [beat for beat in suspects if inspections[beat.rank].evidence in FROZEN]
        waited = time.monotonic() - began
        is_enough = bool(blamed) and _is_enough(blamed, inspections, waited)
        is_over = examination.is_complete or waited >= _LOSS_SECONDS or is_enough
        if not blamed and (is_over or all(inspections[beat.rank].evidence is not None for beat in suspects)):
            return None  # dead rather than frozen; Ray has not reported it yet
    ages = {s.beat.rank: s.age for s in sightings}
    evidence = inspections[blamed[0].rank].evidence
    assert evidence is not None
    finding = HangFinding(tuple(blamed), waited + max(ages[b.rank] for b in blamed), "frozen", FROZEN[evidence])
    _blame(monitor, finding)
    return conclude(monitor, run, finding, inspections)


def _is_enough(blamed: Sequence[HeartbeatState], inspections: dict[int, RankInspection], waited: float) -> bool:
    """Return whether all blamed ranks are known to be stopped, and waiting for more stacks is not worthwhile."""
    if any(inspections[beat.rank].evidence is not HangEvidence.STOPPED for beat in blamed):
        return False
    return waited >= _STOPPED_STACKS_SECONDS or all(inspections[beat.rank].is_whole for beat in blamed)


def _blame(monitor: MonitorClient, finding: HangFinding) -> None:
    monitor.blame(finding)
    monitor.say(describe(finding))


def conclude(
    monitor: MonitorClient, run: str, finding: HangFinding, inspections: dict[int, RankInspection]
) -> WorkerGroupError:
    """Save the stacks, report the hang to user and ledger, end frozen ranks, and return the error to raise."""
    name = f"{FOLDER}/{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-step-{finding.beats[0].step}.txt"
    summary = describe(finding)
    text = "\n\n".join(f"== rank {rank}\n{about.stacks}" for rank, about in sorted(inspections.items()))
    # In a thread, because the storage itself may hang.
    threading.Thread(target=_write, args=(monitor, run, name, f"{summary}\n\n{text}\n"), daemon=True).start()
    first = finding.beats[0]
    frames = innermost(inspections[first.rank].stacks, first.activity) if first.rank in inspections else ""
    monitor.say(
        (f"rank {first.rank} is in {frames}; " if frames else "") + f"stacks of all workers are in {name} of the run"
    )
    for beat in finding.beats:
        monitor.book(
            events.Hang(
                rank=beat.rank,
                node=beat.node,
                address=beat.address,
                pid=beat.pid,
                step=beat.step,
                where=finding.where,
                why=finding.text,
                seconds=finding.seconds,
                file=name,
                stacks={rank: about.stacks[:_EVENT_CHARACTERS] for rank, about in inspections.items()},
            )
        )
    if finding.where == "frozen":
        end(run, [b for b in finding.beats if b.rank in inspections and inspections[b.rank].evidence in _KILLABLE])
    advice = f"{summary}. The stacks are in {name} of the run. If it only needs more time, raise --hang-seconds."
    return WorkerGroupError(summary, {beat.rank: HangError(advice) for beat in finding.beats})


def describe(finding: HangFinding) -> str:
    """Return one line with the ranks that hang, where, and for how long."""
    who = ", ".join(f"rank {b.rank} on node {b.address} (pid {b.pid})" for b in finding.beats)
    have = "has" if len(finding.beats) == 1 else "have"
    return f"{who} {have} made no progress for {finding.seconds:.0f} s at step {finding.beats[0].step}: {finding.text}"


def innermost(stacks: str, activity: Activity) -> str:
    """Return the innermost frames, from py-spy's output, of the input thread or the training thread."""
    thread = "raytf-input" if activity is Activity.INPUT else "TrainingThread"
    match = re.search(rf'^Thread [^\n]*"{thread}[^\n]*\n((?:    [^\n]*\n?)+)', stacks, re.MULTILINE)
    frames = [line.strip() for line in match.group(1).splitlines()] if match else []
    telling = [frame for frame in frames if not any(f"({library}/" in frame for library in _LIBRARIES)]
    return " < ".join((telling or frames)[:_FRAMES])


def _write(monitor: MonitorClient, run: str, name: str, text: str) -> None:
    try:
        Storage(run).put(name, text.encode())
    except (StorageError, OSError) as error:
        monitor.say(f"the stacks could not be written to {name}: {error}")


class StartGuard:
    """Ends workers that are stopped while their group starts, from its own thread, until `over` is called.

    Ray Train's controller waits for these workers. Once they have ended, it treats the start as failed and retries it.
    """

    def __init__(self, monitor: MonitorClient, run_uri: str, group: int):
        self._monitor, self._run_uri, self._group = monitor, run_uri, group
        self._over = threading.Event()
        threading.Thread(target=self._guard, daemon=True, name="raytf-start-guard").start()

    def over(self) -> None:
        """Stop watching, because the group has started or failed to start."""
        self._over.set()

    def _guard(self) -> None:
        before: set[tuple[str, int]] = set()
        seconds = _FIRST_SECONDS
        while not self._over.wait(seconds):
            seconds = _LOOK_SECONDS
            with contextlib.suppress(ray.exceptions.RayError):
                beats = self._workers()
                inspections = Inspector(self._run_uri, beats).collect(_LOOK_SECONDS)
                stopped = [beat for beat in beats if inspections[beat.rank].evidence is HangEvidence.STOPPED]
                if not self._over.is_set():
                    self._end([beat for beat in stopped if (beat.node, beat.pid) in before])
                before = {(beat.node, beat.pid) for beat in stopped}

    def _workers(self) -> list[HeartbeatState]:
        """Return the job's living workers, numbered in place of the ranks that they do not have yet."""
        job = ray.get_runtime_context().job_id
        actors = [a for a in state.living_actors(job) if a["ActorClassName"].rpartition(".")[2] == _WORKER]
        places = [(a["Address"]["NodeID"], a["Address"]["IPAddress"], a["Pid"]) for a in actors]
        return [
            HeartbeatState(self._group, i, len(places), *place, activity=Activity.START)
            for i, place in enumerate(places)
        ]

    def _end(self, beats: list[HeartbeatState]) -> None:
        for beat in beats:
            text = f"a worker on node {beat.address} (pid {beat.pid}) was stopped while it started; ending it"
            self._monitor.say(text)
            why = "it was stopped while it started"
            self._monitor.book(events.Hang(node=beat.node, address=beat.address, pid=beat.pid, where="start", why=why))
        end(self._run_uri, beats)
