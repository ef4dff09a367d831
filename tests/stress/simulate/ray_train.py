"""A simulated Ray Train: a controller that starts, replaces and ends workers, as raytf's policies decide.

`Supervisor` decides whether to try again and which hosts to avoid, `failure_of` and `lost_ranks` what failed and who
continues, `Resizer` and `resizing` how many workers there are and who leaves, `Departures` how long that is waited for,
and `HangDetector` who hangs. What is made up are Ray's processes, and what Ray knows of them and of the cluster.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from raytf.distributed.membership.member import LeftBehindError, UnreachableError
from raytf.driver.ray_train.resizing import (
    ClusterView,
    Departures,
    ResizeDecision,
    Resizer,
    next_size,
    planned_change,
    ranks_to_replace,
)
from raytf.driver.supervision.failures import Cause, Failure, failure_of, lost_ranks
from raytf.driver.supervision.retry import Decision, Scene, Supervisor, without
from raytf.errors import HangError, WorkerLostError
from tests.stress.simulate.hangs import Hangs

if TYPE_CHECKING:
    from tests.stress.simulate.group import Driver, Run, Worker

#: The fewest workers of a run, and seconds between two planned changes of their number.
FEWEST, RESIZE_SECONDS = 2, 20.0
#: Seconds between two looks of the controller, and until Ray tries again to kill a worker that it does not reach.
_LOOK_SECONDS, _KILL_SECONDS = 2.0, 1.0
#: Seconds until Ray knows that a process has ended, and that a host has gone.
_ENDED_SECONDS, _GONE_SECONDS = (1.0, 4.0), 10.0
#: Seconds until the ranks have saved.
_SAVE_SECONDS = 1.0


class ProcessDiedError(Exception):
    """Ray reports that the process of a worker has died."""


class RayTrain:
    """Ray Train's controller of one driver.

    Args:
        run: whose workers it starts.
        driver: with which it ends.

    Attributes:
        group: the workers, by Ray Train's rank.
        hangs: who makes no progress.
        supervisor: decides after failures.
        is_running: whether the group runs, so that the controller watches it.
    """

    def __init__(self, run: Run, driver: Driver):
        self._run, self._driver = run, driver
        self.supervisor = Supervisor(lambda: run.world.now)
        self.group: list[Worker] = []
        self.hangs = Hangs(run)
        self._departures = Departures(lambda: run.world.now)
        self._resizer = Resizer(FEWEST, RESIZE_SECONDS, is_partial=True)
        #: Workers whose end Ray knows.
        self._known: set[Worker] = set()
        #: Ranks that are gone while the others continue; None where all start again.
        self._lost: set[int] | None = set()
        self.is_running = False
        self._nodes: set[str] = set()
        self._unwanted: list[str] = []
        self._noticed_hosts: set[str] = set()
        self._parked_at: float | None = None
        self._reached = 0

    def begin(self) -> None:
        """Start a group, and look after it as long as the driver owns the run."""
        self._run.world.after(0.0, self._look)

    def ended(self, worker: Worker) -> None:
        """A worker has ended, which Ray learns after some time."""
        is_gone = worker.process.host not in self._run.hosts
        seconds = _GONE_SECONDS if is_gone else self._run.world.random.uniform(*_ENDED_SECONDS)
        self._run.world.after(seconds, self._learn, worker)

    def kill(self, worker: Worker) -> None:
        """End a worker as soon as its host can be reached."""
        if worker.phase == "ended":
            return
        if self._is_cut(worker.process.host):
            self._run.world.after(_KILL_SECONDS, self.kill, worker)
        else:
            worker.die()

    def _learn(self, worker: Worker) -> None:
        host = worker.process.host
        if host in self._run.hosts and self._is_cut(host):
            self._run.world.after(_KILL_SECONDS, self._learn, worker)
        else:
            self._known.add(worker)

    def _look(self) -> None:
        driver = self._driver
        if self._run.is_over or driver is not self._run.driver or not driver.process.is_alive or driver.is_concluding:
            return
        if self.is_running:
            self._watch()
        else:
            self._schedule()
        self._run.world.after(_LOOK_SECONDS, self._look)

    # -- failures ------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Look at a group that runs."""
        errors = {rank: _error_of(worker) for rank, worker in enumerate(self.group) if worker in self._known}
        failed = {rank: error for rank, error in errors.items() if error is not None}
        if failed:
            self._fail(failed)
            return
        hung = self.hangs.look(self.group)
        if hung:
            self._run.world.tell(f"{', '.join(self.group[rank].member.name for rank in hung)} must end, since it hangs")
            self._fail({rank: HangError("it makes no progress") for rank in hung})
            return
        self._rescale()

    def _fail(self, errors: dict[int, Exception]) -> None:
        dead = [rank for rank, error in errors.items() if isinstance(error, ProcessDiedError)]
        failure = failure_of(errors, dead, (), lambda: any(self._host(rank) not in self._run.hosts for rank in dead))
        assert failure is not None
        if self._decide(failure, dict(enumerate(map(self._host, range(len(self.group)))))).retry:
            left = [rank for rank, worker in enumerate(self.group) if worker in self._known and rank not in errors]
            self._lost = lost_ranks(failure, errors, left)
        self.supervisor.survivors = max(0, len(self.group) - len(self._lost)) if self._lost else 0
        self.is_running = False

    def _decide(self, failure: Failure, nodes: dict[int, str]) -> Decision:
        self._reached = max([self._reached, *(w.step for w in self._run.workers if w.driver is self._driver)])
        noticed = {rank: host for rank, host in nodes.items() if host in self._noticed_hosts}
        decision = self.supervisor.decide(failure, Scene(self._reached, nodes, noticed))
        self._run.world.tell(f"Ray Train: {decision.message}")
        self._run.supervision.decided(failure, decision, self._reached)
        return decision

    # -- the number of workers -----------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Start a group, or workers beside those that survive."""
        now = self._run.world.now
        if now < self.supervisor.resumes_at:
            return
        size = next_size(self._possible(knock=True), self.supervisor.survivors, FEWEST)
        if size is None:
            return
        self._resizer.started(size, now)
        lost, self._lost = self._lost, set()
        self.is_running = True
        if lost is None or len(lost) >= len(self.group):
            self._start_group(size)
        elif lost:
            self._repair(lost, size)
        else:
            self._change(size)

    def _rescale(self) -> None:
        """Follow the cluster's changes."""
        now, possible = self._run.world.now, self._possible(knock=False)
        mine = {self._host(rank) for rank in range(len(self.group))}
        self._noticed_hosts |= mine & self._run.noticed
        ended = {rank for rank, worker in enumerate(self.group) if worker in self._known}
        if self._departures.left([worker.member.name for worker in self.group], ended):
            self._change(len(self.group))
            return
        if self._departures.are_awaited:
            return
        is_replaced = bool(mine & set(self._unwanted) - self._nodes)
        leaving = bool(mine & self._run.noticed or mine.difference(self._run.hosts) or is_replaced)
        parked = None if self._parked_at is None or now < self._parked_at + _SAVE_SECONDS else True
        match self._resizer.decide(ClusterView(now, len(self.group), possible, leaving, parked)):
            case ResizeDecision.PARK:
                self._parked_at = now
            case ResizeDecision.RELEASE:
                self._parked_at = None
            case ResizeDecision.RESIZE:
                self._run.world.tell(f"Ray Train changes {len(self.group)} workers to {possible}")
                self._resizer.started(possible, now)
                self._change(possible)

    def _possible(self, knock: bool) -> int:
        """How many workers the cluster can run on hosts that stay."""
        run = self._run
        usable = [h for h in run.hosts if h not in run.noticed and not (knock and self._is_cut(h))]
        self._unwanted = self.supervisor.exclusion.excluded(usable, run.world.now)
        self._nodes = without(usable, self._unwanted, FEWEST, run.room)
        return run.room(self._nodes)

    def _host(self, rank: int) -> str:
        return self.group[rank].process.host

    # -- starts and ends -----------------------------------------------------------------------------------------------

    def _start_group(self, size: int) -> None:
        for worker in self.group:
            self.kill(worker)
        self.group, self._noticed_hosts = [], set()
        self._departures.reset()
        self.hangs.begin()
        places = self._places(size)
        if not places:
            self.is_running, self.supervisor.survivors = False, 0
            self._decide(Failure(Cause.START, "Ray found no place for the workers in time", is_wait=True), {})
        for order, host in enumerate(places):
            self.group.append(self._run.start_worker(host, size, order))

    def _repair(self, lost: Collection[int], wanted: int) -> None:
        """Replace lost workers where that can be done, and go on without the others."""
        size = len(self.group)
        new = ranks_to_replace([self._host(rank) for rank in range(size)], lost, wanted, self._nodes)
        for rank in lost:
            self.kill(self.group[rank])
        for rank in new:
            host = self._host(rank)
            if self._is_cut(host):  # the next look at the workers names the dead one again
                self._departures.wait_for_room()
                return
            self.group[rank] = self._run.start_worker(host, size, rank)
            self._replaced([rank])
        if len(new) < len(lost):
            self._drop(set(lost).difference(new))

    def _change(self, wanted: int) -> None:
        """Have another number of workers, or workers on other hosts."""
        gone, before = self._departures.take(), list(self.group)
        if gone:
            for rank in gone:
                self.kill(self.group[rank])
            self._drop(gone)
            return
        going, more = planned_change([worker.process.host for worker in before], wanted, self._nodes)
        places = self._places(more)
        if more and not places:
            self._departures.wait_for_room()
            return
        for host in places:
            self.group.append(self._run.start_worker(host, len(before) + more, len(self.group)))
        if places:
            self._renumber()
            self._replaced(range(len(before), len(self.group)))
        if going:
            names = [before[rank].member.name for rank in going]
            after = [worker.member.name for worker in self.group[len(before) :]]
            self._run.world.tell(f"{', '.join(names)} must leave once {', '.join(after) or 'nobody'} has come")
            self._driver.process.do(self._driver.dismiss, names, after)
            self._departures.dismiss(names)

    def _drop(self, ranks: Collection[int]) -> None:
        size = len(self.group)
        self.group = [worker for rank, worker in enumerate(self.group) if rank not in ranks]
        self._renumber()
        self._replaced(range(size))

    def _renumber(self) -> None:
        """Tell all workers how many they are."""
        for worker in self.group:
            if worker.wanted != len(self.group):
                self._run.network.send(self._driver.process, worker.process, worker.want, len(self.group))

    def _replaced(self, ranks: Iterable[int]) -> None:
        self.hangs.forget(list(ranks))
        self._departures.go_on()

    def _places(self, count: int) -> Sequence[str]:
        """Hosts with room for more workers, all or none."""
        free = {host: self._free(host) for host in sorted(self._nodes)}
        places: list[str] = []
        while len(places) < count:
            hosts = [host for host, slots in free.items() if slots > 0]
            if not hosts:
                return []
            places.append(self._run.world.random.choice(hosts))
            free[places[-1]] -= 1
        return places

    def _is_cut(self, host: str) -> bool:
        return self._run.network.is_cut(self._driver.process.host, host)

    def _free(self, host: str) -> int:
        if host not in self._run.hosts or self._is_cut(host):
            return 0
        # What is reserved for a worker that has died stays reserved until it is replaced or dropped.
        return self._run.slots - sum(worker.process.host == host for worker in {*self._run.living, *self.group})


def _error_of(worker: Worker) -> Exception | None:
    """Return the error that Ray Train sees of a worker that has ended; None for one that has left as planned."""
    if "as planned" in worker.why or worker.why == "the run is over":
        return None
    if worker.why == "killed":
        return ProcessDiedError("its process has died")
    if "cannot reach each other" in worker.why:
        return UnreachableError(worker.why, worker.process.host)
    kind = WorkerLostError if "have not met" in worker.why else LeftBehindError
    return kind(worker.why)
