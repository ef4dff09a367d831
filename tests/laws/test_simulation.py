"""The simulator finds nothing in some thousand schedules, and every mistake that is made on purpose."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.stress.simulate import exhaustive
from tests.stress.simulate.large import LargeGroup
from tests.stress.simulate.mutants import MUTANTS
from tests.stress.simulate.schedule import LEAST_EVENTS, Outcome, faults_of, minimized, simulate

#: Seeds that have found something, by what it was. With other kinds of faults a seed is another schedule, so `MUTANTS`
#: puts most of these mistakes back.
FOUND = {
    3772: "a healthy newcomer was left out, since it was the first to leave a meeting that others explain",
    5003542: "a newcomer that had met the members was left out when it was the first to leave a sum that broke",
    491: "a notice took away the only worker with the state, since members without it counted",
    1796036345086: "a check of the simulator's: a host that does not reach storage kept a group from its number",
    7998: "a node that had been cut off once was refused for as long as its group lived",
    13882: "workers of a driver that had lost the run copied over the newest whole copy, since they looked before it",
    15161: "a check of the simulator's: a rank that thawed restored a state, and was alone with it",
    17451: "a fault of the simulator's: a copy was completed in memory that its rank had let go",
    43953: "a check of the simulator's: a worker waited to join a run that ended",
    48816: "a driver that ended deleted the lease of one that had just taken the run over",
    79503: "a check of the simulator's: the host of a worker that hung disappeared right before it was blamed",
    2638: "who had left as planned counted as survivors, and nobody was left to train",
}
#: Schedules that the gate tries: the same ones within a day, so that a failure can be repeated, and new ones the next.
_PER_DAY = 4000
_FIND = """
import sys
from tests.stress.simulate.mutants import MUTANTS
name, seed = sys.argv[1], int(sys.argv[2])
MUTANTS[name].apply()
from tests.stress.simulate.schedule import simulate
print(simulate(seed).violation)
"""


def told(outcome: Outcome) -> str:
    """The story of a schedule with a violation."""
    faults = minimized(outcome.seed, outcome.violation)
    lines = [f"t={seconds:.2f} {text}" for seconds, text in simulate(outcome.seed, faults, tells=True).story]
    return "\n".join([f"seed {outcome.seed}", *lines])


@pytest.mark.parametrize("seed", FOUND)
def test_schedules_that_have_found_something(seed: int):
    outcome = simulate(seed)
    assert not outcome.violation, told(outcome)


@pytest.mark.gate  # a minute
def test_new_schedules():
    first = datetime.now(UTC).toordinal() * _PER_DAY
    for seed in range(first, first + _PER_DAY):
        outcome = simulate(seed)
        assert not outcome.violation, told(outcome)
        assert outcome.events >= LEAST_EVENTS


def test_a_seed_is_a_schedule():
    one, other = (simulate(7, tells=True) for _ in range(2))
    assert one == other
    assert one.story
    assert simulate(8).events != one.events
    assert len(faults_of(7)) >= 3


@pytest.mark.gate  # 20 s
def test_every_order_of_events_with_one_fault():
    states, ends = exhaustive.search(steps=2, faults=1, most=100_000)
    assert 5_000 < states < 100_000
    assert ends > 100


def test_a_death_among_a_thousand_workers_costs_the_driver_little():
    group = LargeGroup(1000)
    group.begin()
    before = group.cpu_seconds
    group.lose_one()
    assert {member.number for member in group.members.values()} == {2}
    assert group.cpu_seconds - before < 0.2  # of CPU time, so other processes do not matter; it is 0.03 s


@pytest.mark.gate  # half a minute
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mistake_is_found(name: str):
    mutant = MUTANTS[name]
    spec = importlib.util.find_spec(mutant.module)
    assert spec is not None
    assert spec.origin is not None
    assert Path(spec.origin).read_text().count(mutant.right) == 1
    command = [sys.executable, "-c", _FIND, name, str(mutant.seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip(), f"schedule {mutant.seed} does not find it"
