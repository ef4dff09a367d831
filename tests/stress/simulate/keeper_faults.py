"""Faults of keepers and of the memory that they own, drawn beside those of `faults`."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.stress.simulate.faults import Fault
    from tests.stress.simulate.group import Run
    from tests.stress.simulate.keepers import Keeper

#: The most faults of a schedule, and bytes of a host's memory that is full: too few for all of its workers.
_MOST, _FULL = 4, 3


def _keeper(run: Run, fault: Fault) -> Keeper | None:
    living = [keeper for keeper in run.memory.living if not keeper.process.is_frozen]
    return living[fault.who % len(living)] if living else None


def _kill(run: Run, fault: Fault) -> None:
    keeper = _keeper(run, fault)
    if keeper is not None:
        run.world.tell(f"{keeper.process.name} of {keeper.process.host} dies")
        keeper.process.die()


def _freeze(run: Run, fault: Fault) -> None:
    keeper = _keeper(run, fault)
    if keeper is not None:
        run.world.tell(f"{keeper.process.name} of {keeper.process.host} is frozen for {fault.seconds:g} s")
        keeper.process.freeze()
        run.world.after(fault.seconds, keeper.process.thaw)


def _fill(run: Run, fault: Fault) -> None:
    host = run.hosts[fault.who % len(run.hosts)]
    run.world.tell(f"the memory of {host} is full for {fault.seconds:g} s")
    run.memory.sizes[host] = _FULL
    run.world.after(fault.seconds, run.memory.sizes.pop, host, None)


def _for_a_while(name: str, text: str) -> Callable[[Run, Fault], None]:
    def begin(run: Run, fault: Fault) -> None:
        host, hosts = run.hosts[fault.who % len(run.hosts)], getattr(run.memory, name)
        run.world.tell(f"{text} {host} for {fault.seconds:g} s")

        def add(count: int) -> None:
            hosts[host] = hosts.get(host, 0) + count

        add(1)
        run.world.after(fault.seconds, add, -1)

    return begin


def _break(run: Run, fault: Fault) -> None:
    host = run.hosts[fault.who % len(run.hosts)]
    run.world.tell(f"the next copy on {host} fails")
    run.memory.broken.add(host)


#: Kind of a fault -> how often it is drawn, and what begins it.
KINDS: dict[str, tuple[float, Callable[[Run, Fault], None]]] = {
    "death of a keeper": (3, _kill),
    "freeze of a keeper": (1, _freeze),
    "full memory": (1, _fill),
    "late answers of a keeper": (2, _for_a_while("late", "requests are late at the keeper of")),
    "slow copies": (2, _for_a_while("slow", "copies are slow on")),
    "copy that fails": (1, _break),
}


def count(random: Random) -> int:
    """Draw how many faults a schedule has; most have none."""
    return max(0, random.randint(-_MOST, _MOST))
