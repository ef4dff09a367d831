"""Faults of the cluster and of its workers' progress: hosts with notice, hosts that come and go, resizes, and hangs."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from tests.stress.simulate.hangs import HEAD

if TYPE_CHECKING:
    from tests.stress.simulate.faults import Fault
    from tests.stress.simulate.group import Run, Worker

#: The most workers that are wanted: one more than a group can have.
_MOST_WORKERS = 7
#: Fewest seconds between the notice of a host and its end, and seconds until another host comes.
_NOTICE_SECONDS, _COME_SECONDS = 5.0, 15.0


def lose_host(run: Run, host: str) -> None:
    """A host disappears with all its processes; nobody is told."""
    if host not in run.hosts:
        return
    run.checks.last_fault = run.world.now
    run.world.tell(f"host {host} disappears")
    run.hosts.remove(host)
    run.memory.lose_host(host)
    run.noticed.discard(host)
    for other in [*run.hosts, HEAD]:
        for pair in ((host, other), (other, host)):
            run.network.cut(*pair)
    for worker in run.living:
        if worker.process.host == host:
            worker.process.has_child = True
            worker.die()


def notice(run: Run, fault: Fault) -> None:
    """A host of a worker has notice, and goes some seconds later."""
    living = run.living
    staying = [host for host in run.hosts if host not in run.noticed]
    host = living[fault.who % len(living)].process.host if living else ""
    if host not in staying or len(staying) < 3:
        return
    run.world.tell(f"host {host} has notice: it goes in {max(_NOTICE_SECONDS, fault.seconds):g} s")
    run.noticed.add(host)
    run.world.after(max(_NOTICE_SECONDS, fault.seconds), lose_host, run, host)


def two_notices(run: Run, fault: Fault) -> None:
    """Two hosts have notice at once."""
    notice(run, fault)
    notice(run, fault._replace(who=fault.other))


def come_and_go(run: Run, fault: Fault) -> None:
    """A host comes, or one has notice and another one comes a while later, as an autoscaler has it."""
    if fault.who % 2:
        notice(run, fault._replace(who=fault.other))
        run.world.after(_COME_SECONDS, _come, run)
    else:
        _come(run)


def _come(run: Run) -> None:
    run.checks.last_fault = run.world.now
    run.world.tell(f"host {run.new_host()} comes")


def one_more(run: Run, fault: Fault) -> None:
    """One more worker is wanted."""
    run.world.tell("one more worker is wanted")
    run.target = min(run.target + 1, _MOST_WORKERS)


def resize(run: Run, fault: Fault) -> None:
    """Another number of workers is wanted."""
    run.target = 2 + fault.who % (_MOST_WORKERS - 1)
    run.world.tell(f"{run.target} workers are wanted")


def hangs(worker: Worker) -> bool:
    """Whether a worker's next step never ends, or the present one."""
    return math.isinf(worker.seconds)


def hang(run: Run, fault: Fault) -> None:
    """A worker makes no progress any more, and lives: alone, as one that waits for data, or in a step, as all do."""
    living = [worker for worker in run.living if worker.member.has_joined]
    if living:
        worker = living[fault.who % len(living)]
        worker.hangs_alone = bool(fault.other % 4)
        run.world.tell(f"{worker.member.name} hangs {'waiting for data' if worker.hangs_alone else 'in a step'}")
        worker.seconds = math.inf
