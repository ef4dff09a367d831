"""One simulated run with its faults, from a seed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from tests.stress.simulate import clocks, faults, keeper_faults
from tests.stress.simulate.faults import Fault
from tests.stress.simulate.group import Run
from tests.stress.simulate.world import Network, Violation, World

#: Virtual seconds for a run.
_LONGEST = 900.0
#: Seconds that an undisturbed run trains.
_TRAINING_SECONDS = 24.0
#: Share of runs that train longer, so that the number of workers has time to follow the cluster, and their seconds.
_LONG, _LONG_SECONDS = 0.03, 120.0
#: Seconds in which faults begin.
_FAULTY_SECONDS = 24.0
#: A schedule has at least so many events.
LEAST_EVENTS = 200


@dataclass
class Outcome:
    """What has become of a schedule.

    Attributes:
        seed: of the schedule.
        violation: what must never happen and did; empty if all was well.
        events, seconds: that have passed.
        faults: how many of each kind.
        story: lines of (seconds, what happened).
    """

    seed: int
    violation: str
    events: int
    seconds: float
    faults: Counter[str] = field(default_factory=Counter)
    story: list[tuple[float, str]] = field(default_factory=list)


def faults_of(seed: int) -> list[Fault]:
    """Return the faults of a schedule."""
    random, keepers = Random(f"faults {seed}"), Random(f"faults of keepers {seed}")
    found = faults.draw(random, random.randint(3, 8), _FAULTY_SECONDS)
    return sorted(found + faults.draw(keepers, keeper_faults.count(keepers), _FAULTY_SECONDS, keeper_faults.KINDS))


def simulate(seed: int, given: Sequence[Fault] | None = None, tells: bool = False) -> Outcome:
    """Run a schedule.

    Args:
        seed: of all that is drawn.
        given: the faults, instead of those of the seed.
        tells: whether to keep a story.
    """
    chosen = faults_of(seed) if given is None else given
    world = World(seed, tells)
    draw = world.random
    network = Network(world)
    hosts = [f"h{number}" for number in range(draw.randint(2, 6))]
    workers, steps = draw.randint(3, 5), draw.choice((20, 22, 24))
    slots = draw.randint(-(-workers // len(hosts)), 4)
    seconds = _TRAINING_SECONDS if draw.random() > _LONG else _LONG_SECONDS
    run = Run(world, network, hosts, workers, slots, steps, seconds / steps)
    for fault in chosen:
        world.after(fault.at, faults.begin, run, fault)
    violation = ""
    try:
        with clocks.simulated(world):
            world.run(_LONGEST, lambda: run.is_over)
        if not run.is_over:
            raise Violation("the run does not end")
    except Exception as error:  # also a mistake that the code itself finds
        violation = str(error) if isinstance(error, Violation) else f"{type(error).__name__} {error}"
        world.tell(f"VIOLATION: {violation}")
    begun = Counter(fault.kind for fault in chosen if fault.at <= world.now)
    return Outcome(seed, violation, world.events, world.now, begun, world.story)


def minimized(seed: int, violation: str) -> list[Fault]:
    """Return fewer faults of a schedule with which something of the same kind happens still."""
    kept = faults_of(seed)
    for fault in list(kept):
        fewer = [other for other in kept if other is not fault]
        if _kind(simulate(seed, fewer).violation) == _kind(violation):
            kept = fewer
    return kept


def _kind(violation: str) -> str:
    """Return the words of a violation without names and numbers."""
    return " ".join(word for word in violation.split() if word.isalpha())
