"""What must be so of the driver's supervision, whatever happens: retries, hosts, departures, hangs, and the number of
workers."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from raytf.driver.supervision.failures import Cause, Failure
from raytf.driver.supervision.retry import Decision
from tests.stress.simulate.hangs import HANG_SECONDS, is_hung
from tests.stress.simulate.ray_train import FEWEST
from tests.stress.simulate.world import Violation

if TYPE_CHECKING:
    from tests.stress.simulate.group import Run, Worker

#: Seconds of quiet after which the number of workers is the one that is wanted, as far as there is room.
NUMBER_SECONDS = 60.0
#: Steps that a worker may take as long as, and seconds beyond that in which a hang ends: for looks and stacks.
_HANG_STEPS, _END_SECONDS = 20, 20.0
#: Failures in a row without a new step, deaths aside, after which a run may give up.
_FRUITLESS = 5
#: Seconds between two looks.
_LOOK_SECONDS = 2.0


class SupervisionChecks:
    """Of one run."""

    def __init__(self, run: Run):
        self._run = run
        #: The furthest step at a failure, and failures since then that were no deaths.
        self._reached, self._failures = -1, 0
        #: Host -> faults that were booked to it, and hosts that others could not reach.
        self._faults: Counter[str] = Counter()
        self._unreachable: set[str] = set()
        self._dismissed: set[str] = set()
        #: Hangs that were found: a step that hangs again gets twice the time.
        self._hangs = 0
        #: Worker that hangs -> since when the detector could know that.
        self._hanging: dict[Worker, float] = {}
        run.world.after(_LOOK_SECONDS, self._look)

    def new_driver(self) -> None:
        """Another driver knows nothing of failures before it."""
        self._reached, self._failures = -1, 0
        self._faults.clear()
        self._unreachable.clear()

    def decided(self, failure: Failure, decision: Decision, reached: int) -> None:
        """The supervisor has decided after a failure."""
        if reached > self._reached:
            self._reached, self._failures = reached, 0
        elif failure.cause not in (Cause.WORKER_DIED, Cause.NODE_LOST) and not failure.is_wait:
            self._failures += not decision.fault.preemption
        if not decision.retry:
            if self._failures < _FRUITLESS:
                raise Violation(f"the run gives up after {self._failures} failures without a new step: {failure.text}")
            self._run.give_up()
        if not decision.fault.preemption:
            self._faults.update(decision.fault.nodes)
            if failure.is_unreachable:
                self._unreachable.update(decision.fault.nodes)

    def found_hang(self) -> None:
        """The hang detector has found a hang, which ends unless another failure comes first."""
        self._hangs += 1

    def started(self, host: str) -> None:
        """Ray starts a worker."""
        run = self._run
        usable = [h for h in run.hosts if h not in run.noticed and not run.network.is_cut("head", h) and h != host]
        if host in self._unreachable and not any(self._faults[h] for h in usable) and run.room(usable) >= FEWEST:
            raise Violation(f"a worker starts on {host}, which others cannot reach, although {usable} have room")

    def dismissed(self, name: str) -> None:
        """The arbiter has let a worker go for good."""
        if name in self._dismissed:
            raise Violation(f"{name} is dismissed twice")
        self._dismissed.add(name)

    def _look(self) -> None:
        run = self._run
        driver = run.driver
        if not run.is_over and driver.process.is_alive and driver.lease.is_held and not driver.is_concluding:
            self._check_hangs()
            quiet = run.world.now - max(run.checks.last_fault, run.driver.process.troubled)
            reaches_storage = run.store.is_well and not run.store.cut_off  # a group that restores waits for it
            if quiet > NUMBER_SECONDS and reaches_storage and not run.checks.cuts():
                self._check_number(quiet)
        run.world.after(_LOOK_SECONDS, self._look)

    def _check_number(self, quiet: float) -> None:
        run, train = self._run, self._run.train
        if any(worker.driver is not run.driver for worker in run.living):
            return  # those of an earlier driver take the room, until it sees that it has lost the run
        number = sum(worker.phase != "ended" for worker in train.group)
        staying = [host for host in run.hosts if host not in run.noticed]
        least = run.room([host for host in staying if not self._faults[host]])
        if not min(max(least, FEWEST), run.room(staying)) <= number <= run.room(staying):
            wanted = f"{least} to {run.room(staying)}"
            raise Violation(f"{number} workers after {quiet:.0f} s of quiet, where {wanted} are wanted and possible")

    def _check_hangs(self) -> None:
        run, train, now = self._run, self._run.train, self._run.world.now
        hanging = [worker for worker in train.group if is_hung(worker)]
        self._hanging = {worker: since for worker, since in self._hanging.items() if worker in hanging}
        if hanging:
            run.checks.last_fault = now
        most = max(HANG_SECONDS, _HANG_STEPS * run.step_seconds) * 2**self._hangs + _END_SECONDS
        for worker in hanging:
            if run.checks.is_troubled(worker) or not train.is_running:
                self._hanging[worker] = now  # as long as it is silent too, it is judged by that
            since = self._hanging.setdefault(worker, now)
            if now - since > most:
                raise Violation(f"{worker.member.name} hangs for {now - since:.0f} s, and nobody ends it")
