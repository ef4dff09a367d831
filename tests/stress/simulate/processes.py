"""What the processes of a simulation do; a spawned process cannot import it from `__main__`."""

from __future__ import annotations

from tests.stress.simulate import page
from tests.stress.simulate.mutants import MUTANTS

#: Schedules that are tried with a mistake.
_TRIES = 50_000


def run(seeds: range) -> page.Totals:
    """Run schedules, and return what they have come to."""
    from tests.stress.simulate.schedule import simulate

    totals = page.Totals()
    for seed in seeds:
        totals.count(simulate(seed))
    return totals


def find(name: str) -> tuple[str, int | None]:
    """Return the name of a mistake and the seed of the first schedule that finds it; None for none."""
    MUTANTS[name].apply()
    from tests.stress.simulate.schedule import simulate

    return name, next((seed for seed in range(_TRIES) if simulate(seed).violation), None)
