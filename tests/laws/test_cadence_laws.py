"""Checkpoints on storage under faults: whatever comes when, memory that goes costs no more than a cadence."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from raytf.checkpoint.commit import Commit, Event, Phase, Votes
from raytf.training.saving.checkpoint_policy import YOUNG_SECONDS, Cadence, Outage, SaveSchedule

NEVER = 10**9


@dataclass
class Run:
    """A run of one rank in simulated time, which saves as `raytf.training.saving.checkpointer.Checkpointer` does.

    A save's share is on storage after `half` seconds; its manifest as long after the ranks have agreed on that, at the
    end of a call. A fault ends the group, and what it writes. The next group goes on from the state after the
    last call, or from storage where there is no memory.
    """

    cadence: Cadence
    step_seconds: float
    half: float
    has_memory: bool = True
    now: float = 0.0
    step: int = 0
    #: Step and time of the newest checkpoint.
    durable: int = 0
    #: Steps at which saves began, by group.
    begun: list[list[int]] = field(default_factory=list)
    worst: float = 0.0

    @property
    def takes(self) -> float:
        """A save, at most: both halves, and the calls after which the ranks agree."""
        return 2 * self.half + 3 * self.step_seconds

    def group(self, seconds: float) -> None:
        """A group trains so long, and dies."""
        if not self.has_memory:
            self.step = self.durable
        self.begun.append([])
        self._schedule = SaveSchedule(self.cadence, self.step, self.durable or None, self.now, lambda: 0.0)
        self._commit: Commit[int] = Commit(self, 1)
        self._good = 0.0
        self._ready_at = self._manifest_at = math.inf
        if self.step > self.durable:
            self._commit.begin(self.step)
        end = self.now + seconds
        while self.now + self.step_seconds <= end:
            self._call()
        self._advance_storage(end)
        self.now = end

    def begin(self, step: int) -> None:
        self.begun[-1].append(step)
        self._schedule.begin(step, self.now)
        self._save_step, self._saved_at = step, self.now
        self._ready_at, self._manifest_at = self.now + self.half, math.inf

    def vote(self, phase: Phase) -> Votes:
        written = float(phase is Phase.WRITING and self._ready_at <= self.now)
        return Votes(written=written, committed=float(phase is Phase.COMMITTING and self._manifest_at <= self.now))

    def commit(self) -> None:
        self._manifest_at = self.now + self.half

    def done(self) -> None:
        self._good = self.now - self._saved_at

    def abort(self) -> None:
        raise AssertionError("no save fails here")

    def _advance_storage(self, until: float) -> None:
        if self._manifest_at <= until:
            self.durable = max(self.durable, self._save_step)

    def _call(self) -> None:
        stop = self.step + 1
        due = self._schedule.is_due(stop, self.now, self._good)
        votes = Votes(want=float(self._commit.is_idle and due)) + self._commit.votes()
        self.now += self.step_seconds
        self.step = stop
        self._schedule.stepped(self.now)
        self._advance_storage(self.now)
        assert self._commit.advance(votes, lambda: stop) is not Event.FAILED
        self.worst = max(self.worst, (self.step - self.durable) * self.step_seconds)


SECONDS = st.floats(0.05, 3.0)


@settings(max_examples=400, deadline=None)
@given(st.floats(1.0, 60.0), SECONDS, st.floats(0.0, 8.0), st.lists(st.floats(1.0, 60.0), min_size=1, max_size=12))
def test_memory_that_goes_costs_a_cadence_and_a_save_at_most(every, step_seconds, half, lives):
    run = Run(Cadence.of(None, every), step_seconds, half)
    for life in lives:
        run.group(max(life, run.takes + step_seconds))
    assert run.worst <= max(every, 2 * run.takes) + run.takes + 3 * step_seconds


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 100), SECONDS, st.floats(0.0, 8.0), st.lists(st.floats(1.0, 60.0), min_size=1, max_size=12))
def test_a_cadence_of_steps_is_kept_whatever_faults_come(every, step_seconds, half, lives):
    run = Run(Cadence.of(every, None), step_seconds, half)
    for life in lives:
        run.group(max(life, run.takes + step_seconds))
    assert run.worst <= max(every * step_seconds, run.takes) + 2 * run.takes + 3 * step_seconds


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([Cadence.of(NEVER, None), Cadence.of(None, None), Cadence.of(None, 3600.0)]),
    SECONDS,
    st.floats(0.0, 5.0),
    st.lists(st.floats(1.0, 60.0), min_size=2, max_size=10),
    st.booleans(),
)
def test_each_group_leaves_half_of_its_work_also_without_memory(cadence, step_seconds, half, lives, has_memory):
    run = Run(cadence, step_seconds, half, has_memory)
    run.group(YOUNG_SECONDS + run.takes + 3 * step_seconds)  # the first step does not count
    assert run.durable >= 1, "the first checkpoint comes within seconds of the first steps"
    for life in lives:
        before = run.durable
        run.group(life)
        kept = (run.durable - before) * step_seconds
        left = life - run.takes
        assert kept >= min(left / 2, left - YOUNG_SECONDS, left - run.takes) - 3 * step_seconds


@given(SECONDS, st.floats(0.0, 5.0), st.floats(10.0, 3000.0))
def test_a_restart_costs_few_saves(step_seconds, half, life):
    run = Run(Cadence.of(NEVER, None), step_seconds, half)
    run.group(run.takes + step_seconds)
    run.group(life)
    assert len(run.begun[1]) <= 3 + max(0.0, math.log2(life / YOUNG_SECONDS))


@given(SECONDS, st.floats(0.0, 5.0), st.integers(2, 20))
def test_groups_that_make_no_step_write_nothing(step_seconds, half, deaths):
    run = Run(Cadence.of(None, None), step_seconds, half, has_memory=False)
    run.group(run.takes + step_seconds)
    for _ in range(deaths):
        run.group(step_seconds / 2)
    assert run.begun[1:] == [[]] * deaths


@given(st.floats(0.5, 4000.0), st.integers(1, 50), st.floats(0.0, 0.999))
def test_an_outage_that_ends_is_noticed_within_a_cadence(every, failures, chance):
    cadence = Cadence.of(None, every)
    outage = Outage(lambda: chance, cadence.most_pause)
    for n in range(failures):
        outage.fail(float(n), "storage is away")
    assume(outage.failures)
    pause = outage.retry_at - (failures - 1)
    assert pause <= max(every, 30.0)
    assert outage.allows(outage.retry_at, due=False)
