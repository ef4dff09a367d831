"""Faults from outside, at given steps of a run: signals to processes, nodes that come and go, storage that fails."""

from __future__ import annotations

import contextlib
import enum
import random
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from raytf.testing import processes
from raytf.testing.cluster import ElasticCluster, Node
from raytf.testing.job import Job
from raytf.testing.storage import StorageProxy

#: How long a run may take to train again after a fault before the next one is injected all the same.
_RECOVERY_SECONDS = 90.0
#: How long to wait for a worker to kill, where a group is just starting.
_TARGET_SECONDS = 60.0


class Kind(enum.StrEnum):
    """What a fault does."""

    WORKER = "worker"  # SIGKILL to one worker
    PAUSE = "pause"  # SIGSTOP to one worker, and SIGCONT some seconds later
    NODE = "node"  # SIGKILL to all processes of a node
    RAYLET = "raylet"  # SIGKILL to a node's raylet
    DRAIN = "drain"  # notice for a node, and SIGKILL to all of it some seconds later
    ADD = "add"  # a node joins
    CONTROLLER = "controller"  # SIGKILL to Ray Train's controller
    DRIVER = "driver"  # SIGKILL to the command; it is started again
    STORAGE = "storage"  # the next writes to the object store fail


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        step: global step that the run must have reached.
        kind: what is done.
        target: which of the living workers or nodes, modulo their number, the oldest node first.
        seconds: from SIGSTOP to SIGCONT, or from a node's notice to its end.
        writes: to the object store that fail.
        at_once: do not wait until the run has recovered from the fault before.
    """

    step: int
    kind: Kind
    target: int = 0
    seconds: float = 10.0
    writes: int = 1
    at_once: bool = False


@dataclass(frozen=True)
class Injection:
    """What became of a fault.

    Attributes:
        done: what was done, or, after `skipped:` or `not reached:`, why nothing was.
        step: that the run had reached, as its status file said; None where it had ended.
        workers: world size before it.
        seconds: since the plan began.
    """

    fault: Fault
    done: str
    step: int | None
    workers: int | None
    seconds: float


@dataclass(frozen=True)
class Report:
    """How a run under a plan ended.

    Attributes:
        code: exit code of the last start of the command.
        output: of all starts.
        starts: how often the command was started.
        injections: one for each fault.
        seconds: from the first start to the end.
    """

    code: int
    output: str
    starts: int
    injections: list[Injection] = field(default_factory=list)
    seconds: float = 0.0


class FaultPlan:
    """Faults in the order in which they are injected.

    Args:
        faults: with steps that do not go down.

    Raises:
        ValueError: the steps go down.
    """

    def __init__(self, faults: Sequence[Fault]):
        self.faults = list(faults)
        steps = [fault.step for fault in self.faults]
        if steps != sorted(steps):
            raise ValueError(f"faults are injected one after another, so their steps cannot go down: {steps}")

    @classmethod
    def random(
        cls,
        seed: int | str,
        steps: int,
        events: int,
        kinds: Sequence[Kind] = (Kind.WORKER, Kind.NODE, Kind.DRAIN, Kind.ADD, Kind.DRIVER),
        at_once: float = 0.2,
    ) -> FaultPlan:
        """A plan drawn from a seed; the same for the same arguments.

        Args:
            seed: of the draw.
            steps: of the run; faults come in its first four fifths.
            events: how many faults.
            kinds: to draw from; give one twice to have it drawn twice as often.
            at_once: share of faults that do not wait for recovery.
        """
        draw = random.Random(f"raytf {seed}")
        last = max(1, steps * 4 // 5)
        at = sorted(draw.randint(1, last) for _ in range(events))
        return cls(
            [
                Fault(s, draw.choice(kinds), draw.randrange(1000), round(draw.uniform(2, 12), 1), 1, i > 0 and d)
                for i, (s, d) in enumerate((s, draw.random() < at_once) for s in at)
            ]
        )

    def run(
        self,
        command: Sequence[str],
        status_file: Path,
        log: Path,
        cluster: ElasticCluster | None = None,
        proxy: StorageProxy | None = None,
        env: Mapping[str, str] | None = None,
        folder: Path | None = None,
        most_nodes: int = 4,
        most_starts: int = 10,
        limit_seconds: float = 900.0,
    ) -> Report:
        """Start a command, inject the faults, and start it again where one of them ended it.

        Args:
            command: with `--status-file` set to `status_file`.
            log: file for the output of the command; later starts get a number.
            cluster: on which it runs; None for a command with a Ray of its own.
            proxy: in front of the object store, for STORAGE.
            env: added to the environment of a plain user.
            folder: in which it runs.
            most_nodes: that ADD makes.
            most_starts: of the command.
            limit_seconds: for all of it.

        Raises:
            AssertionError: the run does not end in time; with what it printed.
        """
        return _Run(self, command, status_file, log, cluster, proxy, env, folder, most_nodes, most_starts).play(
            limit_seconds
        )


class _Run:
    def __init__(self, plan, command, status_file, log, cluster, proxy, env, folder, most_nodes, most_starts):
        self._plan, self._command, self._status_file, self._log = plan, command, status_file, log
        self._cluster: ElasticCluster | None = cluster
        self._proxy, self._folder = proxy, folder
        self._env = processes.environment(**(cluster.env if cluster else {}), **(env or {}))
        self._most_nodes, self._most_starts = most_nodes, most_starts
        self._outputs: list[Path] = []
        self._later: list[tuple[threading.Timer, Callable[[], None]]] = []
        self._began = time.monotonic()
        self._job: Job

    def play(self, limit_seconds: float) -> Report:
        self._deadline = self._began + limit_seconds
        self._start()
        injections: list[Injection] = []
        try:
            recovered: Callable[[], bool] = lambda: True  # noqa: E731
            for fault in self._plan.faults:
                reached = self._wait_for(fault, recovered)
                status = self._job.status or {}
                before = {p.pid for p in self._workers()}
                done = self._inject(fault) if reached else "not reached: the run had ended"
                injections.append(
                    Injection(
                        fault,
                        done,
                        status.get("step") if reached else None,
                        status.get("workers"),
                        time.monotonic() - self._began,
                    )
                )
                if reached and not done.startswith("skipped"):
                    recovered = self._recovery(fault, before)
            while self._step_of_life():
                time.sleep(0.1)
            output = "".join(path.read_text() for path in self._outputs)
            seconds = time.monotonic() - self._began
            return Report(self._job.ended(), output, len(self._outputs), injections, seconds)
        finally:
            for timer, action in self._later:
                timer.cancel()
                timer.join()
                action()
            self._job.close()

    def _start(self) -> None:
        log = self._log.with_name(f"{self._log.name}.{len(self._outputs)}") if self._outputs else self._log
        self._outputs.append(log)
        self._job = Job(self._command, log, self._env, self._folder, self._status_file)

    def _step_of_life(self) -> bool:
        """Whether the run goes on; starts the command again where it was ended."""
        if time.monotonic() >= self._deadline:
            raise AssertionError(f"the run did not end in time:\n{self._job.output}")
        if self._job.is_running:
            return True
        if self._job.ended() == 0 or len(self._outputs) >= self._most_starts:
            return False
        self._job.close()
        self._start()
        return True

    def _wait_for(self, fault: Fault, recovered: Callable[[], bool]) -> bool:
        patience = time.monotonic() + _RECOVERY_SECONDS
        while self._step_of_life():
            status = self._job.status
            ready = fault.at_once or recovered() or time.monotonic() >= patience
            if status is not None and status["step"] >= fault.step and ready:
                return True
            time.sleep(0.05)
        return False

    def _recovery(self, fault: Fault, before: set[int]) -> Callable[[], bool]:
        """Whether the run trains again after a fault, to be asked again and again."""
        injected = time.time()
        seen: list[float] = []

        def trains() -> bool:
            pids, status = {p.pid for p in self._workers()}, self._job.status
            if status is None or status["phase"] != "training":
                return False
            if fault.kind is Kind.ADD:
                return len(pids) > len(before)
            if fault.kind in (Kind.PAUSE, Kind.STORAGE):
                wait = fault.seconds if fault.kind is Kind.PAUSE else 0.0
                return status["time"] > injected + wait + 1.0
            if not pids or pids & before:
                return False
            # The first status after new processes are seen may still be an old one.
            if not seen or seen[-1] != status["time"]:
                seen.append(status["time"])
            return len(seen) > 2

        return trains

    def _workers(self) -> list[psutil.Process]:
        return self._cluster.workers() if self._cluster else self._job.processes(processes.WORKER)

    def _a_worker(self, fault: Fault) -> psutil.Process | None:
        deadline = time.monotonic() + _TARGET_SECONDS
        while self._step_of_life() and time.monotonic() < deadline:
            found = self._workers()
            if found:
                return found[fault.target % len(found)]
            time.sleep(0.05)
        return None

    def _a_node(self, fault: Fault) -> Node | None:
        nodes = self._cluster.nodes if self._cluster else []
        return nodes[fault.target % len(nodes)] if len(nodes) > 1 else None

    def _after(self, seconds: float, action: Callable[[], None]) -> None:
        timer = threading.Timer(seconds, action)
        self._later.append((timer, action))
        timer.start()

    def _inject(self, fault: Fault) -> str:
        match fault.kind:
            case Kind.WORKER | Kind.PAUSE:
                worker = self._a_worker(fault)
                if worker is None:
                    return "skipped: there was no worker"
                if fault.kind is Kind.WORKER:
                    processes.end([worker])
                    return f"SIGKILL to worker process {worker.pid}"
                _signal(worker, signal.SIGSTOP)
                self._after(fault.seconds, lambda: _signal(worker, signal.SIGCONT))
                return f"SIGSTOP to worker process {worker.pid} for {fault.seconds:g} s"
            case Kind.NODE | Kind.RAYLET | Kind.DRAIN:
                node = self._a_node(fault)
                if node is None:
                    return "skipped: the last node stays"
                if fault.kind is Kind.NODE:
                    node.kill()
                    return f"SIGKILL to all of node {node.id[:8]}"
                if fault.kind is Kind.RAYLET:
                    node.kill_raylet()
                    return f"SIGKILL to the raylet of node {node.id[:8]}"
                node.drain(fault.seconds)
                self._after(fault.seconds, node.kill)
                return f"notice for node {node.id[:8]}, which ends {fault.seconds:g} s later"
            case Kind.ADD:
                if self._cluster is None or len(self._cluster.nodes) >= self._most_nodes:
                    return "skipped: there are nodes enough"
                return f"node {self._cluster.add_node().id[:8]} joined"
            case Kind.CONTROLLER:
                found = self._cluster.controllers() if self._cluster else self._job.processes(processes.CONTROLLER)
                processes.end(found)
                return f"SIGKILL to {len(found)} controller" if found else "skipped: there was no controller"
            case Kind.DRIVER:
                self._job.kill()
                return "SIGKILL to the driver"
            case Kind.STORAGE:
                if self._proxy is None:
                    return "skipped: there is no proxy in front of the storage"
                self._proxy.fail_writes(fault.writes)
                return f"the next {fault.writes} writes fail"


def _signal(process: psutil.Process, number: signal.Signals) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):  # killed in the meantime, which ends a pause too
        process.send_signal(number)
