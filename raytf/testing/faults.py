"""Faults at chosen steps of a run, listed or drawn from a seed, and the player that injects them."""

from __future__ import annotations

import contextlib
import enum
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, Unpack

import psutil

from raytf.testing import processes
from raytf.testing.cluster import ElasticCluster, Node
from raytf.testing.job import Job
from raytf.testing.storage_proxy import StorageProxy

#: Seconds between two polls of a run; more frequent polls of its processes would load a core.
_POLL_SECONDS = 0.2
#: Seconds for a run to recover from a fault, after which the next one is injected in any case.
_RECOVERY_SECONDS = 90.0
#: Seconds to wait for a worker to kill, while a group is starting.
_TARGET_SECONDS = 60.0
#: Seconds after a fault in which an exit of the command counts as the fault's effect, even after a restart.
_BLAME_SECONDS = 60.0


class Kind(enum.StrEnum):
    """The kinds of faults."""

    WORKER = "worker"  # SIGKILL to one worker
    PAUSE = "pause"  # SIGSTOP to one worker, SIGCONT some seconds later
    NODE = "node"  # SIGKILL to all processes of a node
    RAYLET = "raylet"  # SIGKILL to a node's raylet
    DRAIN = "drain"  # notice of preemption for a node, SIGKILL to its processes some seconds later
    ADD = "add"  # a node joins
    CONTROLLER = "controller"  # SIGKILL to Ray Train's controller
    DRIVER = "driver"  # SIGKILL to the command, which is then started again
    STORAGE = "storage"  # writes to the object store fail


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        step: global step at which the fault is due.
        kind: the kind of the fault.
        target: index of the worker or node among the living ones, the oldest node first, modulo their number.
        seconds: time from SIGSTOP to SIGCONT, or from a node's notice to its end.
        writes: number of writes to the object store that fail.
        after_writes: number of writes to the object store that succeed before that.
        at_once: whether not to wait until the run has recovered from the previous fault.

    Raises:
        ValueError: a number is negative, or `writes` is 0.
    """

    step: int
    kind: Kind
    target: int = 0
    seconds: float = 10.0
    writes: int = 1
    at_once: bool = False
    after_writes: int = 0

    def __post_init__(self) -> None:
        if min(self.step, self.target, self.seconds, self.after_writes) < 0 or self.writes < 1:
            raise ValueError(f"expected numbers that are not negative, and at least one write: {self}")
        object.__setattr__(self, "kind", Kind(self.kind))  # callers may pass its plain name


@dataclass(frozen=True)
class Injection:
    """The result of a fault.

    Attributes:
        done: the action, or `skipped: ` or `not reached: ` with the reason.
        step: step of the run in its status file; None if the run had ended.
        workers: world size before the fault; None if the run had ended.
        seconds: time since the start of the plan.
    """

    fault: Fault
    done: str
    step: int | None
    workers: int | None
    seconds: float

    @property
    def is_done(self) -> bool:
        """Whether anything was done."""
        return not self.done.startswith(("skipped", "not reached"))

    def __str__(self) -> str:
        step = "" if self.step is None else f", at step {self.step} with {self.workers} workers"
        return f"{self.seconds:6.1f} s  {self.fault.kind} wanted at step {self.fault.step}{step}: {self.done}"


@dataclass(frozen=True)
class Report:
    """The outcome of a run under a plan.

    Attributes:
        code: exit code of the last start of the command.
        output: output of all starts.
        starts: how often the command was started.
        injections: one for each fault.
        seconds: time from the first start to the end.
    """

    code: int
    output: str
    starts: int
    injections: list[Injection] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        end = f"exit code {self.code} after {self.seconds:.0f} s and {self.starts} starts"
        return "\n".join([end, *map(str, self.injections)])


class PlayLimits(TypedDict, total=False):
    """Limits of a run under faults."""

    most_nodes: int
    """The most nodes in the cluster, beyond which ADD starts none; by default 4."""
    most_starts: int
    """The most starts of the command; by default 10."""
    limit_seconds: float
    """Seconds for the whole run; by default 900."""


_LIMITS = PlayLimits(most_nodes=4, most_starts=10, limit_seconds=900.0)


class FaultPlan:
    """Faults in the order in which they are injected.

    Args:
        faults: the faults, with steps that never decrease.

    Raises:
        ValueError: the steps decrease.
    """

    def __init__(self, faults: Sequence[Fault]):
        self.faults = list(faults)
        steps = [fault.step for fault in self.faults]
        if steps != sorted(steps):
            raise ValueError(f"faults are injected in order, so their steps must not decrease: {steps}")

    @classmethod
    def random(
        cls,
        seed: int | str,
        steps: int,
        events: int,
        kinds: Sequence[Kind] = (Kind.WORKER, Kind.NODE, Kind.DRAIN, Kind.ADD, Kind.DRIVER),
        at_once: float = 0.2,
    ) -> FaultPlan:
        """Draw a plan from a seed; the same arguments give the same plan.

        Args:
            seed: seed of the draw.
            steps: number of steps of the run. The first four fifths are split into as many parts as there are faults,
                and each part has one fault at a random step.
            events: number of faults.
            kinds: kinds to draw from; list one twice to draw it twice as often.
            at_once: share of faults that do not wait for recovery.

        Raises:
            ValueError: there are fewer steps than faults.
        """
        last = max(1, steps * 4 // 5)
        if events > last:
            raise ValueError(f"{events} faults do not fit in {steps} steps: expected at most {last}")
        draw = random.Random(f"raytf {seed}")
        edges = [1 + last * i // events for i in range(events + 1)] if events else []
        at = [draw.randrange(low, high) for low, high in itertools.pairwise(edges)]
        faults = []
        for number, step in enumerate(at):
            kind, target, seconds = draw.choice(kinds), draw.randrange(1000), round(draw.uniform(2, 12), 1)
            is_at_once = draw.random() < at_once
            faults.append(Fault(step, kind, target, seconds, at_once=number > 0 and is_at_once))
        return cls(faults)

    def run(
        self,
        command: Sequence[str],
        status_file: Path,
        log: Path,
        cluster: ElasticCluster | None = None,
        proxy: StorageProxy | None = None,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        **limits: Unpack[PlayLimits],
    ) -> Report:
        """Start a command, inject the faults, and restart the command if a fault ended it.

        A fault waits until the run has reached its step and has recovered from the previous fault, for the latter at
        most 90 s. A fault that would end the last node is skipped. An exit code other than 0 is final unless a fault
        was injected after the command was started, or in the minute before.

        Args:
            command: the command, with `--status-file` set to `status_file`.
            status_file: a file in the format of raytf: JSON with at least `step`, `workers`, `phase` and `time`.
            log: file for the output of the command; for later starts, a number is appended to the name.
            cluster: the cluster on which it runs; None for a command that starts its own Ray.
            proxy: the proxy in front of the object store, for STORAGE.
            env: variables to add to the environment of a plain user.
            folder: working directory; by default the folder of the log.
            limits: fields of `PlayLimits`.

        Raises:
            AssertionError: the run does not end in time; the message has the faults so far and the output.
        """
        environment = processes.environment(**{**(cluster.env if cluster else {}), **(env or {})})

        def start(log: Path) -> Job:
            return Job(command, log, environment, folder, status_file)

        return FaultPlayer(start, log, cluster, proxy, limits).through(self.faults)


class FaultPlayer:
    """One run under faults; `FaultPlan.run` explains the arguments."""

    def __init__(
        self,
        start: Callable[[Path], Job],
        log: Path,
        cluster: ElasticCluster | None,
        proxy: StorageProxy | None,
        limits: PlayLimits,
    ):
        self._start_job, self._cluster, self._proxy = start, cluster, proxy
        self._limits = _LIMITS | limits
        self._later: list[tuple[threading.Timer, Callable[[], None]]] = []
        self._doomed: set[str] = set()
        self._injections: list[Injection] = []
        self._began, self._harmed_at = time.monotonic(), float("-inf")
        self._logs = [log]
        self._start()

    def through(self, faults: Sequence[Fault]) -> Report:
        """Inject all faults, and wait for the end of the run."""
        recovered: Callable[[], bool] = _always
        try:
            for fault in faults:
                status = self._wait_for(fault, recovered)
                before = {worker.pid for worker in self._workers()}
                done = "not reached: the run had ended" if status is None else self._inject(fault)
                step, workers = (None, None) if status is None else (status["step"], status["workers"])
                injection = Injection(fault, done, step, workers, time.monotonic() - self._began)
                self._injections.append(injection)
                if injection.is_done:
                    self._harmed_at = time.monotonic()
                    recovered = self._recovery(fault, before)
            while self._goes_on():
                time.sleep(0.1)
            seconds = time.monotonic() - self._began
            return Report(self._job.ended(), self._output(), len(self._logs), self._injections, seconds)
        finally:
            for timer, action in self._later:
                timer.cancel()
                timer.join()
                action()
            self._job.close()

    def _start(self) -> None:
        self._job, self._started_at = self._start_job(self._logs[-1]), time.monotonic()

    def _output(self) -> str:
        return "".join(log.read_text(errors="replace") for log in self._logs)

    def _goes_on(self) -> bool:
        """Return whether the run continues, after restarting the command if a fault ended it."""
        if time.monotonic() - self._began >= self._limits["limit_seconds"]:
            injections = "\n".join(map(str, self._injections))
            raise AssertionError(
                f"no end within {self._limits['limit_seconds']:.0f} s. Faults:\n{injections}\nOutput:\n{self._output()}"
            )
        if self._job.is_running:
            return True
        is_blamed = self._harmed_at >= self._started_at - _BLAME_SECONDS
        if self._job.ended() == 0 or not is_blamed or len(self._logs) >= self._limits["most_starts"]:
            return False
        self._job.close()
        first = self._logs[0]
        self._logs.append(first.with_name(f"{first.name}.{len(self._logs)}"))
        self._start()
        return True

    def _wait_for(self, fault: Fault, recovered: Callable[[], bool]) -> dict | None:
        """Wait until a fault is due, and return the run's status, or None if the run ends first."""
        patience = time.monotonic() + _RECOVERY_SECONDS
        while self._goes_on():
            status = self._job.status
            ready = fault.at_once or recovered() or time.monotonic() >= patience
            if status is not None and status["step"] >= fault.step and ready:
                return status
            time.sleep(_POLL_SECONDS)
        return None

    def _recovery(self, fault: Fault, before: set[int]) -> Callable[[], bool]:
        """Return a function that checks whether the run has recovered from a fault."""
        injected = time.monotonic()
        seen: list[float] = []

        def trains() -> bool:
            pids, status = {worker.pid for worker in self._workers()}, self._job.status
            if status is None or status["phase"] != "training":
                return False
            if fault.kind is Kind.ADD:
                return len(pids) > len(before)
            if fault.kind in (Kind.PAUSE, Kind.STORAGE):
                wait = fault.seconds if fault.kind is Kind.PAUSE else 0.0
                if time.monotonic() <= injected + wait + 1.0:
                    seen[:] = [status["time"]]
                return seen != [status["time"]]
            if not pids or before <= pids:  # no worker has died yet; later, the others continue, or all restart
                return False
            # The first status after a death may still be from before it.
            if not seen or seen[-1] != status["time"]:
                seen.append(status["time"])
            return len(seen) > 2

        return trains

    def _workers(self) -> list[psutil.Process]:
        return self._cluster.workers() if self._cluster else self._job.processes(processes.WORKER)

    def _a_worker(self, fault: Fault) -> psutil.Process | None:
        deadline = time.monotonic() + _TARGET_SECONDS
        while self._goes_on() and time.monotonic() < deadline:
            workers = self._workers()
            if workers:
                return workers[fault.target % len(workers)]
            time.sleep(_POLL_SECONDS)
        return None

    def _a_node(self, fault: Fault) -> Node | None:
        # A node with notice counts as lost. Otherwise, the last other node could be chosen while it still runs.
        nodes = [n for n in self._cluster.nodes if n.id not in self._doomed] if self._cluster else []
        return nodes[fault.target % len(nodes)] if len(nodes) > 1 else None

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        def harm() -> None:
            self._harmed_at = time.monotonic()
            action()

        timer = threading.Timer(seconds, harm)
        self._later.append((timer, action))
        timer.start()

    def _inject(self, fault: Fault) -> str:
        match fault.kind:
            case Kind.WORKER | Kind.PAUSE:
                return self._hit_worker(fault)
            case Kind.NODE | Kind.RAYLET | Kind.DRAIN:
                return self._hit_node(fault)
            case Kind.ADD:
                if self._cluster is None or len(self._cluster.nodes) >= self._limits["most_nodes"]:
                    return "skipped: there are enough nodes"
                return f"node {self._cluster.add_node().id[:8]} joined"
            case Kind.CONTROLLER:
                own = self._cluster.controllers() if self._cluster else self._job.processes(processes.CONTROLLER)
                processes.end(own)
                return f"SIGKILL to {len(own)} controller" if own else "skipped: there was no controller"
            case Kind.DRIVER:
                self._job.kill()
                return "SIGKILL to the driver"
            case Kind.STORAGE:
                if self._proxy is None:
                    return "skipped: there is no proxy in front of the storage"
                self._proxy.fail_writes(fault.writes, fault.after_writes)
                return f"{fault.writes} writes fail after {fault.after_writes} successful ones"

    def _hit_worker(self, fault: Fault) -> str:
        worker = self._a_worker(fault)
        if worker is None:
            return "skipped: there was no worker"
        if fault.kind is Kind.WORKER:
            processes.end([worker])
            return f"SIGKILL to worker process {worker.pid}"
        _signal(worker, signal.SIGSTOP)
        self._after(fault.seconds, lambda: _signal(worker, signal.SIGCONT))
        return f"SIGSTOP to worker process {worker.pid} for {fault.seconds:g} s"

    def _hit_node(self, fault: Fault) -> str:
        node = self._a_node(fault)
        if node is None:
            return "skipped: the last node stays"
        if fault.kind is Kind.NODE:
            node.kill()
            return f"SIGKILL to all of node {node.id[:8]}"
        if fault.kind is Kind.RAYLET:
            node.kill_raylet()
            return f"SIGKILL to the raylet of node {node.id[:8]}"
        try:
            node.drain(fault.seconds)
        except RuntimeError as error:
            return f"skipped: Ray refused the notice: {error}"
        self._doomed.add(node.id)
        self._after(fault.seconds, node.kill)
        return f"notice for node {node.id[:8]}, which ends {fault.seconds:g} s later"


def _always() -> bool:
    return True


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # it was killed, which ends a pause, too
        process.send_signal(number)
