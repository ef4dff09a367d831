"""Faults: drawn from a seed beforehand, so that a story can be told with fewer of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from random import Random
from typing import NamedTuple

from tests.stress.simulate import cluster_faults, keeper_faults, storage_faults
from tests.stress.simulate.group import HEAD, Run, Worker
from tests.stress.simulate.storage_faults import later as _later

#: Kind of a fault -> how often it is drawn, and what begins it.
Kinds = Mapping[str, tuple[float, Callable[["Run", "Fault"], None]]]


class Fault(NamedTuple):
    """Something that goes wrong.

    Attributes:
        at: seconds since the beginning.
        kind: key of `KINDS`, or of `keeper_faults.KINDS`.
        who: a number that chooses a worker or a host.
        other: another one.
        seconds: how long it lasts.
    """

    at: float
    kind: str
    who: int
    other: int
    seconds: float


def draw(random: Random, count: int, seconds: float, table: Kinds | None = None) -> list[Fault]:
    """Draw some faults.

    Args:
        random: from which they are drawn.
        count: how many.
        seconds: in which they begin.
        table: of kinds, by default those of this module.
    """
    table = KINDS if table is None else table
    kinds, weights = list(table), [weight for weight, _ in table.values()]
    found = []
    for _ in range(count):
        kind = random.choices(kinds, weights)[0]
        lasts = random.choice((0.2, 1.0, 3.0, 5.0, 8.0, 20.0, 90.0))
        found.append(Fault(random.uniform(0.0, seconds), kind, random.randrange(100), random.randrange(100), lasts))
    return sorted(found)


def begin(run: Run, fault: Fault) -> None:
    """Have a fault begin."""
    if fault.kind in keeper_faults.KINDS:  # which excuse nothing
        keeper_faults.KINDS[fault.kind][1](run, fault)
        return
    run.checks.last_fault = run.world.now
    KINDS[fault.kind][1](run, fault)


def _worker(run: Run, number: int) -> Worker | None:
    living = run.living
    return living[number % len(living)] if living else None


def _host(run: Run, number: int) -> str:
    return run.hosts[number % len(run.hosts)]


def _kill(run: Run, fault: Fault, has_child: bool = False) -> None:
    worker = _worker(run, fault.who)
    if worker is not None:
        run.world.tell(f"{worker.member.name} dies" + (", and its child keeps its sockets open" if has_child else ""))
        worker.process.has_child = has_child
        worker.die()


def _kill_with_child(run: Run, fault: Fault) -> None:
    _kill(run, fault, has_child=True)


def _kill_two(run: Run, fault: Fault) -> None:
    _kill(run, fault)
    _kill(run, fault._replace(who=fault.other))


def _kill_givers(run: Run, fault: Fault) -> None:
    """Those that are furthest die while others take the state from them; tried for a while."""
    takers = [worker for worker in run.living if worker.is_taking]
    if not takers:
        if run.world.now - fault.at < fault.seconds:
            run.world.after(0.05, _kill_givers, run, fault)
        return
    run.checks.last_fault = run.world.now
    run.world.tell("those that give the state die")
    furthest = max(worker.step for worker in run.living)
    for worker in run.living:
        if worker.step == furthest and not worker.is_taking:
            worker.die()


def _kill_all(run: Run, fault: Fault) -> None:
    run.world.tell("all workers die")
    for worker in run.living:
        worker.die()


def _lose_host(run: Run, fault: Fault) -> None:
    if len([host for host in run.hosts if host not in run.noticed]) > 2:
        cluster_faults.lose_host(run, _host(run, fault.who))


def _freeze(run: Run, fault: Fault) -> None:
    worker = _worker(run, fault.who)
    if worker is None or worker.process.is_frozen:
        return
    run.world.tell(f"{worker.member.name} is frozen for {fault.seconds:g} s")
    worker.process.freeze()
    worker.process.troubled = run.world.now + fault.seconds
    _later(run, fault.seconds, worker.process.thaw)


def _freeze_all(run: Run, fault: Fault) -> None:
    for number in range(len(run.living)):
        _freeze(run, fault._replace(who=number))


def _freeze_driver(run: Run, fault: Fault) -> None:
    process, seconds = run.driver.process, min(fault.seconds, 20.0)
    if process.is_frozen or not process.is_alive:
        return
    run.world.tell(f"the driver is frozen for {seconds:g} s")
    process.freeze()
    process.troubled = run.world.now + seconds
    _later(run, seconds, process.thaw)


def _restart_driver(run: Run, fault: Fault) -> None:
    if run.driver.process.is_alive:
        run.command_ended(run.driver, "it dies", min(fault.seconds, 8.0))


def _cut(run: Run, one: str, other: str, seconds: float | None, is_both: bool) -> None:
    pairs = [(one, other), (other, one)] if is_both else [(one, other)]
    for host in (one, other):
        run.checks.cut_at[host] = run.world.now
    for pair in pairs:
        run.network.cut(*pair)
    if seconds is not None:
        _later(run, seconds, _heal, run, pairs)


def _heal(run: Run, pairs: Sequence[tuple[str, str]]) -> None:
    run.world.tell(f"the link between {pairs[0][0]} and {pairs[0][1]} is there again")
    for sender, receiver in pairs:
        run.network.heal(sender, receiver)
        for host in (sender, receiver):
            run.checks.cut_at[host] = run.world.now
        for worker in run.living:
            if HEAD in (sender, receiver) and worker.process.host in (sender, receiver):
                worker.process.troubled = run.world.now


def _cut_pair(run: Run, fault: Fault, is_both: bool = True) -> None:
    one, other = _host(run, fault.who), _host(run, fault.other)
    if one != other:
        way = "between" if is_both else "in one direction between"
        run.world.tell(f"the link {way} {one} and {other} is cut for {fault.seconds:g} s")
        _cut(run, one, other, fault.seconds, is_both)


def _cut_one_way(run: Run, fault: Fault) -> None:
    _cut_pair(run, fault, is_both=False)


def _cut_from_head(run: Run, fault: Fault) -> None:
    host = _host(run, fault.who)
    is_both = fault.other % 2 == 0
    run.world.tell(f"the link between {host} and the driver is cut for {fault.seconds:g} s")
    pair = (host, HEAD) if fault.other % 4 < 2 else (HEAD, host)
    _cut(run, *pair, fault.seconds, is_both)


def _cut_in_halves(run: Run, fault: Fault) -> None:
    half = [host for number, host in enumerate(run.hosts) if (fault.who >> number) & 1]
    rest = [host for host in [*run.hosts, HEAD] if host not in half]
    run.world.tell(f"the network is cut into {half} and {rest} for {fault.seconds:g} s")
    for one in half:
        for other in rest:
            _cut(run, one, other, fault.seconds, True)


def _slow(run: Run, fault: Fault) -> None:
    worker = _worker(run, fault.who)
    if worker is not None and worker.seconds == run.step_seconds:
        run.world.tell(f"{worker.member.name} is slow for {fault.seconds:g} s")
        worker.seconds = 3 * run.step_seconds
        _later(run, fault.seconds, _hasten, run, worker)


def _hasten(run: Run, worker: Worker) -> None:
    if not cluster_faults.hangs(worker):
        worker.seconds = run.step_seconds


def _at_meeting(begin: Callable[[Run, Fault], None], run: Run, fault: Fault) -> None:
    """A fault of another worker or its host begins when the next worker meets the others, or is connected with them."""

    def now(worker: Worker) -> None:
        others = [n for n, other in enumerate(run.living) if other is not worker]
        hosts = [n for n, host in enumerate(run.hosts) if host == worker.process.host]
        if others and hosts:
            run.checks.last_fault = run.world.now
            is_cut = begin in (_cut_pair, _cut_one_way)
            begin(run, fault._replace(who=hosts[0] if is_cut else others[fault.who % len(others)]))

    run.at["connected" if fault.at * 1000 % 2 < 1 else "meeting"].append(now)


KINDS: Kinds = {
    "death": (5, _kill),
    "death with a forked child": (3, _kill_with_child),
    "death of two": (2, _kill_two),
    "death of those that give the state": (1, _kill_givers),
    "death of all": (0.5, _kill_all),
    "loss of a host": (1, _lose_host),
    "freeze": (4, _freeze),
    "freeze of all": (0.5, _freeze_all),
    "freeze of the driver": (1, _freeze_driver),
    "death of the driver": (1, _restart_driver),
    "cut link": (3, _cut_pair),
    "cut in one direction": (3, _cut_one_way),
    "cut from the driver": (2, _cut_from_head),
    "network in halves": (1, _cut_in_halves),
    "slow worker": (1, _slow),
    "newcomer": (3, cluster_faults.one_more),
    "notice": (3, cluster_faults.notice),
    "storage out": (1, storage_faults.out),
    "lost answers of storage": (1, storage_faults.lossy),
    "slow storage": (1, storage_faults.slow),
    "late lists of storage": (0.5, storage_faults.late),
    "host without storage": (1, storage_faults.cut_off),
    "second command": (2, storage_faults.second_command),
    "jump of a clock": (1, storage_faults.wrong_clock),
    "cut link in a meeting": (1, partial(_at_meeting, _cut_pair)),
    "cut in one direction in a meeting": (1, partial(_at_meeting, _cut_one_way)),
    "freeze in a meeting": (1, partial(_at_meeting, _freeze)),
    "death in a meeting, with a forked child": (1, partial(_at_meeting, _kill_with_child)),
    "resize": (2, cluster_faults.resize),
    "hosts that come and go": (2, cluster_faults.come_and_go),
    "hang": (2, cluster_faults.hang),
    "two notices at once": (1, cluster_faults.two_notices),
}
