"""What must be so whatever happens, checked at each event that could break it."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from raytf.driver.arbitration import CUT_OFF
from tests.stress.simulate.arithmetic import SHARDS, expected
from tests.stress.simulate.world import Violation

if TYPE_CHECKING:
    from tests.stress.simulate.group import Driver, Run, Worker

#: Seconds for a new step while somebody has the state, and while the run begins with a checkpoint.
NEW_STEP_SECONDS, RESTART_SECONDS = 30.0, 60.0
#: Seconds between two looks.
LOOK_SECONDS = 2.0
#: How long the arbiter refuses newcomers from a host that members did not reach.
REFUSE_SECONDS = 60.0
#: Ends that follow from what happened to the worker, or are planned.
_PLANNED = ("killed", "the run is over", "the others continue without this worker, as planned")


class Checks:
    """Of one run.

    Attributes:
        last_fault: when the last fault began or ended.
        cut_at: host -> when a link of its was cut or healed.
    """

    def __init__(self, run: Run):
        self._run = run
        self.last_fault = 0.0
        self.cut_at: dict[str, float] = {}
        #: Host -> when a member there had to end since its links were cut.
        self._failed_at: dict[str, float] = {}
        self._last_step = 0.0
        #: Step at which each generation of a driver began.
        self._begins: dict[tuple[int, int], int] = {}
        #: Steps that workers have finished after the next generation had begun.
        self._late_steps: Counter[str] = Counter()
        run.world.after(LOOK_SECONDS, self._look)

    def began(self, generation: dict[str, Any], driver: Driver) -> None:
        """The arbiter begins a generation."""
        key = driver.number, generation["number"]
        if key in self._begins:
            raise Violation(f"two generations have number {key}")
        self._begins[key] = max(generation["steps"])
        if len(generation["members"]) > SHARDS:
            raise Violation(f"generation {key} has more members than there are shards")
        leaving = [worker for worker in driver.workers.values() if worker.member.name in generation["dismissed"]]
        if any(worker.step >= 0 for worker in leaving) and max(generation["steps"]) < 0:
            raise Violation(f"all that have the state are dismissed before generation {key}")
        for name in generation["dismissed"]:
            self._run.supervision.dismissed(f"{driver.number} {name}")
            missing = set(self._run.notices[name]).difference(driver.workers)
            if missing:
                raise Violation(f"{name} leaves before {sorted(missing)} have come")

    def met(self, worker: Worker) -> None:
        """A rank has met the others of its generation."""
        assert worker.generation is not None
        if len(set(worker.generation.members)) < len(worker.generation.members):
            raise Violation(f"a worker has two ranks in generation {worker.key}")

    def took(self, worker: Worker) -> None:
        """A rank has got the state with which its generation begins."""
        self._check_state(worker, "begins with")
        begin = self._begins[worker.key]
        if begin < 0:
            self._begins[worker.key] = worker.step
        elif worker.step != begin:
            raise Violation(f"{worker.member.name} begins at step {worker.step} where its generation does at {begin}")

    def trained(self, worker: Worker) -> None:
        """A rank has finished a step."""
        if worker.driver is self._run.driver:
            self._last_step = self._run.world.now
        self._check_state(worker, "has")
        number, generation = worker.key
        if (number, generation + 1) in self._begins:
            # A rank that was frozen may finish the step whose parts it has, before it hears that it is left behind.
            self._late_steps[worker.member.name] += 1
            if self._late_steps[worker.member.name] > 1:
                raise Violation(f"{worker.member.name} trains in generation {worker.key} after the next one has begun")

    def restored(self, by: Worker, name: str) -> None:
        """A rank whose generation nobody brought a state to begins with a checkpoint, or without one."""
        self._run.ownership.restored(name)
        if by.driver.workers.get(by.member.name) is not by:
            return  # `by` was frozen, and does not know yet that the others go on without it
        for worker in self._run.living:
            is_other = worker.driver is by.driver and worker.key != by.key
            if is_other and worker.has_state and not self.is_troubled(worker):
                raise Violation(f"a checkpoint is restored although {worker.member.name} has step {worker.step}")

    def ended(self, worker: Worker) -> None:
        """A worker has ended."""
        if worker.why in _PLANNED or not worker.driver.process.is_alive or self.is_troubled(worker):
            return
        now, host = self._run.world.now, worker.process.host
        if now - self.cut_at.get(host, float("-inf")) < NEW_STEP_SECONDS or host in self._cut_hosts():
            if worker.member.number:
                self._failed_at[host] = now
            return
        if worker.why == CUT_OFF and now - self._failed_at.get(host, float("-inf")) <= REFUSE_SECONDS:
            return
        raise Violation(f"{worker.member.name} was well and has to end: {worker.why}")

    def finished(self, result: int) -> None:
        """A rank has come to the end of the run."""
        if result != expected(self._run.end_step):
            raise Violation("the run's result is not that of an undisturbed run")

    def written(self, name: str) -> None:
        """A manifest was written by who owns the run: the checkpoint can be restored."""
        step, count = self._run.store.manifests[name]
        shares = self._run.store.shares.get(name, {})
        if any(shares.get(rank) != expected(step) for rank in range(count)):
            raise Violation(f"checkpoint {name} of {count} shares cannot be restored: {sorted(shares)}")

    def _check_state(self, worker: Worker, verb: str) -> None:
        if worker.state != expected(worker.step):
            raise Violation(f"{worker.member.name} {verb} a wrong state at step {worker.step}")

    def _look(self) -> None:
        run = self._run
        now, driver = run.world.now, run.driver
        quiet = now - max(self._last_step, self.last_fault, driver.process.troubled)
        if driver.process.is_alive and not driver.process.is_frozen and not run.is_over:
            since = now - NEW_STEP_SECONDS
            living = [w for w in run.living if w.driver is driver and w.has_state and w.has_state_since < since]
            having = [w for w in living if not self.is_troubled(w)]
            if having and quiet > NEW_STEP_SECONDS:
                raise Violation(
                    f"no step for {quiet:.0f} s although {having[0].member.name} has the state and the driver lives"
                )
            # Workers of an earlier driver take the room until it sees that it has lost the run.
            is_well = run.store.is_well and not run.store.cut_off and all(w.driver is driver for w in run.living)
            if quiet > RESTART_SECONDS and not self.cuts() and is_well:
                raise Violation(f"no step for {quiet:.0f} s although nothing is wrong any more")
            if quiet > NEW_STEP_SECONDS or now - self.last_fault > NEW_STEP_SECONDS:
                self._check_newcomers()
        for worker in run.living:
            if worker.overdue and not worker.process.is_frozen:
                raise Violation(f"{worker.member.name} waits for {worker.overdue[0]} of its host, which is gone")
        run.world.after(LOOK_SECONDS, self._look)

    def _check_newcomers(self) -> None:
        """Who could join must not wait for long."""
        run, since = self._run, self._run.world.now - NEW_STEP_SECONDS
        if run.driver.is_concluding:
            return
        members = sum(worker.has_state and not self.is_troubled(worker) for worker in run.living)
        for worker in run.living:
            is_waiting = worker.phase == "asking" and not worker.member.number and worker.started_at < since
            is_well = worker.driver is run.driver and not self.is_troubled(worker) and not self.cuts()
            if is_waiting and is_well and self.last_fault < since and 0 < members < SHARDS:
                raise Violation(f"{worker.member.name} waits since {worker.started_at:.0f} s to join")

    def is_troubled(self, worker: Worker) -> bool:
        """Whether something is wrong with a worker, its driver, or the link between them, or was a while ago."""
        since = self._run.world.now - NEW_STEP_SECONDS
        processes = worker.process, worker.driver.process
        return any(p.is_frozen or p.troubled > since for p in processes) or self._run.network.is_cut(
            worker.process.host, worker.driver.process.host
        )

    def _cut_hosts(self) -> set[str]:
        return {host for pair in self._run.network.cuts for host in pair}

    def cuts(self) -> list[tuple[str, str]]:
        """Pairs of hosts that are there and between which nothing gets through."""
        here = {*self._run.hosts, "head"}
        return [pair for pair in self._run.network.cuts if here.issuperset(pair)]
