"""What many schedules have come to, as lines and as docs/evidence/simulation.md."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # a mutant must be loaded before it
    from tests.stress.simulate.schedule import Outcome

_HEAD = """# The simulator

`python -m tests.stress.simulate --seeds SEEDS --page docs/evidence/simulation.md` wrote this page. It runs groups of
workers in a simulated world: one thread, with a clock, a network, processes and storage that are drawn from a seed.
All decisions are made by the code that makes them in production:

- `raytf.driver.arbitration`, `raytf.driver.supervision.liveness` and `raytf.distributed.membership.generations`, in
  the driver, decide which workers belong to the group, which are lost, and which are left out.
- `raytf.driver.supervision.retry`, with `failures` and `hang_detector`, and
  `raytf.driver.ray_train.resizing`, in the driver's controller of Ray Train, decide whether to restart, on which
  hosts and with how many workers, which workers leave, and which hang.
- `raytf.distributed.membership.member` and `raytf.checkpoint.commit`, in the workers, decide when workers meet again,
  who gives the state to whom, and when a checkpoint is complete.
- `raytf.distributed.membership.rendezvous` and `raytf.distributed.membership.peer_liveness`, in the workers, decide
  which ranks a rank calls and answers, when a rendezvous has failed, and which ranks of a sum are lost.
- `raytf.runs.lease_decisions`, in driver and workers, decides which of several drivers owns the run, and whether a
  worker may still write in its name.
- `raytf.checkpoint.cleanup`, in the workers, decides which checkpoints are deleted.
- `raytf.checkpoint.slot_ledger`, in the keepers of copies in memory, decides which rank gets which memory, and which
  memory is freed.
- `raytf.checkpoint.keeper_client`, `slot_ledger` and `restore`, in the workers, decide when a keeper is lost and
  replaced, which of a rank's two slots the next copy uses, and from which copy or checkpoint a new group continues.

The surroundings of this code are simulated: sockets, /proc, heartbeats, the sum over the ranks (each rank sends its
part to all others), storage, and Ray with its processes and its view of the cluster. Keepers live in simulated
processes, and workers write into their memory. Simulated workers train whole numbers, so that the state after each
step is known.

In each schedule 3 to 5 workers train under 3 to 8 faults. Up to 4 more faults concern keepers: a keeper dies,
freezes, receives requests late or has too little memory, and copies are slow or fail. At each event the simulator
checks that

- each rank has the state of an undisturbed run after each step: no step is lost, and none is made twice;
- only one of two groups trains;
- while the driver and a worker with the state are alive, there is a new step within 30 s, and a worker that waits to
  join gets in within 30 s;
- no healthy worker ends, and no worker leaves before its replacements have joined, or leaves twice;
- after 60 s without a fault there are as many workers as are wanted and possible;
- a host that others cannot reach gets no worker while another host has room;
- a run gives up only after five failures in a row without a new step, not counting deaths;
- a worker that hangs is ended within the time of the hang detector, and no worker that makes progress is blamed;
- a committed checkpoint can be restored, and only the run's owner commits, and deletes what others restore;
- a healthy driver keeps the run, whatever storage does, and a driver that has lost the run ends and says so;
- a checkpoint is restored only if no worker has the state;
- no memory is taken from workers that continue the run, and the slots of a host are bounded;
- a copy does not overwrite the newest copy that is complete on all ranks, and is not written into memory whose keeper
  is gone;
- a new group starts with the newest step that is complete in the memory it can reach, or on storage.

`python -m tests.stress.simulate --seed N` prints the story of a schedule. If the schedule fails, it reduces the
faults to as few as possible.
"""


@dataclass
class Totals:
    """Of many schedules.

    Attributes:
        schedules, events: how many.
        shortest: the fewest events of a schedule.
        seconds: virtual ones.
        wall_seconds, processes: how long it took, and on how many processes.
        faults: how many of each kind.
        violations: seeds.
    """

    schedules: int = 0
    events: int = 0
    shortest: int = 1 << 60
    seconds: float = 0.0
    wall_seconds: float = 0.0
    processes: int = 1
    faults: Counter[str] = field(default_factory=Counter)
    violations: list[int] = field(default_factory=list)

    def count(self, outcome: Outcome) -> None:
        """Add a schedule."""
        one = Totals(1, outcome.events, outcome.events, outcome.seconds, faults=outcome.faults)
        one.violations = [outcome.seed] if outcome.violation else []
        self.add(one)

    def add(self, other: Totals) -> None:
        """Add the schedules of another process."""
        self.schedules += other.schedules
        self.events += other.events
        self.shortest = min(self.shortest, other.shortest)
        self.seconds += other.seconds
        self.faults += other.faults
        self.violations = sorted([*self.violations, *other.violations])

    def lines(self) -> list[str]:
        """Return what a person wants to know."""
        rate = self.schedules / max(1e-9, self.wall_seconds)
        return [
            f"{self.schedules:,} schedules with {self.events:,} events (at least {self.shortest:,} in each) in "
            f"{self.seconds / 3600:,.0f} virtual hours",
            f"{self.wall_seconds:,.0f} s on {self.processes} processes: {rate:,.0f} schedules a second",
            f"{sum(self.faults.values()):,} faults; violations: {len(self.violations)} {self.violations[:10] or ''}",
        ]


def page(totals: Totals, mutants: Mapping[str, int | None], large: str, orders: str) -> str:
    """Return the page.

    Args:
        totals: of the schedules.
        mutants: the seed that finds each mistake, by its name.
        large: what a death in a large group costs.
        orders: what following every order of events has come to.
    """
    faults = "\n".join(f"| {kind} | {count:,} |" for kind, count in sorted(totals.faults.items()))
    made = "\n".join(
        f"| {name} | {'not found' if seed is None else f'{seed + 1:,}'} |" for name, seed in mutants.items()
    )
    found = sum(seed is not None for seed in mutants.values())
    return f"""{_HEAD.replace("SEEDS", str(totals.schedules))}
## Result

{chr(10).join(f"- {line}" for line in totals.lines())}

| fault | times |
| --- | --- |
{faults}

## A large group

`python -m tests.stress.simulate --large 1000` measures the arbiter's own code, up to its sockets. {large}.

## Every order of events

`python -m tests.stress.simulate.exhaustive` follows every order of events of a group of three workers. One of them
joins late. The group trains four steps with up to two faults: a death, or a worker that does not reach another one when
they meet. It reached {orders}.

## Mistakes made on purpose

The simulator detects {found} of {len(mutants)} mistakes. Each mistake is one change of the code above. The column has
the number of schedules until it was detected.

| mistake | schedules |
| --- | --- |
{made}
"""
