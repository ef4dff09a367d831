"""Warm processes: on each node, one idle process per worker that has imported TensorFlow and waits for the next group.

A restart spends most of its time starting Python and importing TensorFlow. Ray gives an actor an idle process that was
started ahead of time, if the process has exactly the actor's runtime environment. So when a group has trained for some
seconds, each of its nodes starts such processes, and a spare node starts as many as the node that it may replace. A
hook in the runtime environment makes them import what every worker needs, but nothing that depends on a setting of the
run. Ray assigns the processes to the job and ends them with it, even if its driver is killed. When a node runs out of
memory, Ray ends them first. If a warm process is missing, the worker starts in a new process as usual.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import threading
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path

import ray

from raytf import _process
from raytf._process import process_age, process_start
from raytf._ray import raylets, worker_process
from raytf.distributed.gpu import visibility

#: Memory of a warm process.
PROCESS_BYTES = 700 << 20
#: Memory that must stay free on a node in addition to that of its warm processes.
SPARE_BYTES = 2 << 30
#: Title of a warm process in `ps`; Ray overwrites it when a worker takes the process.
TITLE = "ray::IDLE raytf warm"
#: All modules that a worker imports before the user's code. None of them creates a TensorFlow operation, after which
#: settings could no longer be changed.
_MODULES = (
    "tensorflow",
    "keras",
    "ray.train.collective",
    worker_process.TRAIN_WORKER,
    "raytf.training.worker",
    "raytf.training.loop",
    "raytf.training.synchronous",
)
#: How long Ray keeps an idle process: practically forever, since Ray ends the processes with the job.
KEEP_SECONDS = 10 * 365 * 86400
#: Seconds of training before warm processes are started: starting them takes CPU time from a group that has just
#: restarted and has work to catch up on.
_SETTLE_SECONDS = 5.0
#: The nice value at which a process imports while a group trains on its node. Each step waits for the slowest worker,
#: and an import that uses only idle CPU time delays a worker far less than one that takes half a core.
BESIDE_TRAINING = 10
#: A warm process that is younger than this many seconds was started for the group that takes it, at the same time as
#: the group's controller.
_NEW_SECONDS = 20.0
#: Seconds after which a requested process that has not started is requested again.
_START_SECONDS = 60.0


def missing(workers: int, warm: int, free_bytes: int) -> tuple[int, str]:
    """Return how many more warm processes a node should start.

    Args:
        workers: number of workers on the node.
        warm: number of warm processes that the node has or that were requested.
        free_bytes: free memory of the node.

    Returns:
        The number, and the reason if the node cannot start the processes that it lacks; the reason is empty if it can.
    """
    lacking = max(0, workers - warm)
    needed = SPARE_BYTES + lacking * PROCESS_BYTES
    if lacking and free_bytes < needed:
        return 0, (
            f"{free_bytes / 2**30:.1f} GiB of its memory are free, and {lacking} would need "
            f"{lacking * PROCESS_BYTES / 2**30:.1f} GiB in addition to {SPARE_BYTES >> 30} GiB that must stay free"
        )
    return lacking, ""


class WarmProcesses:
    """The warm processes of a node for one job, as files: `PID` for each process, `asked-NICE-ID` for each request.

    Args:
        folder: folder on the node; need not exist.
        clock: seconds, of a clock that only goes forward and is the same for all processes of the node.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic):
        self._folder, self._clock = folder, clock

    @classmethod
    def here(cls) -> WarmProcesses:
        """Return the warm processes of this process's node and job."""
        context = ray.get_runtime_context()
        return cls(worker_process.session_folder() / "raytf-warm" / f"{context.get_node_id()}-{context.get_job_id()}")

    def ask(self, count: int, nice: int = 0) -> None:
        """Record requests for this many processes, which import at a nice value."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for _ in range(count):
            asked = self._folder / f"asked-{nice}-{uuid.uuid4().hex}"
            asked.touch()
            os.utime(asked, (self._clock(), self._clock()))

    def claim(self, pid: int) -> int | None:
        """Register this process as one that was requested.

        Returns:
            The nice value at which to import; None if there is no open request.
        """
        for asked in self._folder.glob("asked-*"):
            own = self._folder / str(pid)
            try:
                asked.rename(own)
            except FileNotFoundError:  # another process was faster
                continue
            own.write_text(process_start(pid) or "")
            return int(asked.name.split("-")[1])
        return None

    def leave(self, pid: int) -> bool:
        """Remove this process, which becomes a worker, and return whether it was a warm process."""
        try:
            (self._folder / str(pid)).unlink()
        except OSError:
            return False
        return True

    def is_starting(self) -> bool:
        """Return whether a requested process has not begun to import."""
        self.count()  # removes requests that are too old
        return any(self._folder.glob("asked-*"))

    def count(self) -> int:
        """Return how many processes wait, import, or were requested. Removes those that died or never started."""
        number = 0
        for path in self._folder.glob("*"):
            try:
                is_request = path.name.startswith("asked-")
                if self._clock() - path.stat().st_mtime < _START_SECONDS if is_request else _lives(path):
                    number += 1
                else:
                    path.unlink()
            except FileNotFoundError:
                continue
        return number


def _lives(path: Path) -> bool:
    start = process_start(int(path.name)) if path.name.isdecimal() else None
    # A process that started at another time has reused the PID of one that died. A new file is empty for a moment.
    return start is not None and path.read_text() in (start, "")


# -- in the driver -----------------------------------------------------------------------------------------------------


def environment(quiet: bool, hidden: bool) -> dict[str, str]:
    """Return the environment variables of a run's workers that make processes started ahead of time become warm.

    They include the variables that modules read when they are imported, since that happens before `worker.set_up`.

    Args:
        quiet: silence TensorFlow's messages.
        hidden: the run's workers have no GPU, and must not even start the GPU driver. For workers with GPUs this is
            left open: a warm process has no GPU until a worker takes it.
    """
    variables = calling(__name__, get_warm.__name__) | {"KERAS_BACKEND": "tensorflow"}
    return variables | ({"TF_CPP_MIN_LOG_LEVEL": "3"} if quiet else {}) | (visibility.HIDDEN if hidden else {})


def calling(module: str, function: str) -> dict[str, str]:
    """Return the environment variables that make a process call a function of raytf as soon as it has started."""
    # A process can have only one hook, so ours calls the job's own.
    others = (ray.get_runtime_context().runtime_env.get("env_vars") or {}).get(worker_process.HOOK)
    hook = _make_hook(worker_process.driver_paths(), others, module, function)
    return {worker_process.HOOK: worker_process.export_hook(hook)}


def _make_hook(paths: list[str], others: str | None, module: str, function: str) -> Callable[[], None]:
    call_others = worker_process.hook_caller(others) if others else None

    def prepare_process() -> None:
        # Pickled by value, as nested functions are: the node may find raytf only in the job's own folders, which Ray
        # adds later, or not at all. Ray ends a process whose hook raises, so this hook must not raise.
        import importlib
        import sys
        import traceback

        if call_others is not None:
            call_others()
        sys.path[:0] = [path for path in paths if path not in sys.path]
        try:
            getattr(importlib.import_module(module), function)()
        except Exception:
            traceback.print_exc()  # into Ray's log of the process

    return prepare_process


# -- in a process that was started ahead -------------------------------------------------------------------------------

#: Whether this process was warm, or still importing, when it became a worker.
started_warm = False
#: When this worker completed its first step.
_first_step_at: float | None = None


def get_warm() -> None:
    """Import what workers need, if this process was started ahead of time. A worker may take it at any moment, even
    while it is importing."""
    nice = WarmProcesses.here().claim(os.getpid())
    if nice is None:
        return  # not started ahead of time: a worker waits for this process
    worker_process.set_title(TITLE)
    if nice:
        import_beside(nice)
    else:
        import_all()


def import_beside(nice: int) -> None:
    """Import what workers need, at a lower priority.

    Args:
        nice: value to add to this process's nice value.
    """

    def do() -> None:
        own = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, own, os.getpriority(os.PRIO_PROCESS, own) + nice)
        import_all()

    # In a thread, since an unprivileged process cannot raise its priority again. Threads that an import starts inherit
    # this thread's priority, so NumPy starts its compute threads before; TensorFlow starts its own in a worker.
    importlib.import_module("numpy")
    thread = threading.Thread(target=do)
    thread.start()
    thread.join()


def import_all() -> None:
    """Import what workers need."""
    try:
        with _process.uncollected():
            for module in _MODULES:
                importlib.import_module(module)
    except Exception:
        traceback.print_exc()  # into Ray's log; the worker will get the same error and report it


def become_worker() -> None:
    """Note that this process is a worker from now on."""
    global started_warm
    if not ray.is_initialized():  # in a benchmark, where asking for the node would start Ray
        return
    started_warm = WarmProcesses.here().leave(os.getpid())


def is_new() -> bool:
    """Return whether this process was started for its current group, instead of waiting as a warm process."""
    return not started_warm or process_age() < _NEW_SECONDS


# -- in a worker, or a task on a spare node ----------------------------------------------------------------------------


def trains() -> None:
    """Note that this worker has completed its first step."""
    global _first_step_at
    _first_step_at = time.monotonic()


@dataclasses.dataclass(frozen=True)
class WarmAnswer:
    """A node's answer to `prepare`.

    Attributes:
        ready: whether the node has all its warm processes, or cannot have them.
        why: why the node cannot have them; empty otherwise.
        runtime_env: runtime environment of the group's workers; empty while it is too early to start processes.
    """

    ready: bool
    why: str = ""
    runtime_env: str = ""


def prepare(workers: int, runtime_env: str = "", is_urgent: bool = False, nice: int = 0) -> WarmAnswer:
    """Start the warm processes that this node lacks; may be called repeatedly.

    Args:
        workers: number of workers that the node runs, or may run.
        runtime_env: runtime environment of the workers; by default that of this process, which is then a worker.
        is_urgent: wait only for the group's first step.
        nice: nice value at which the processes import while a group trains. Unless it is 0, they start one at a time:
            until a process imports, it has the group's priority, and several would delay the group by seconds.
    """
    if not runtime_env:
        settle = 0.0 if is_urgent else _SETTLE_SECONDS
        if _first_step_at is None or time.monotonic() - _first_step_at < settle:
            return WarmAnswer(False)
        runtime_env = ray.get_runtime_context().get_runtime_env_string()
    processes = WarmProcesses.here()
    lacking, why = missing(workers, processes.count(), raylets.free_bytes())
    count = lacking
    if nice and lacking:
        count = 0 if processes.is_starting() else 1
    if count:
        processes.ask(count, nice)
        node, job = worker_process.worker_node(), ray.get_runtime_context().get_job_id()
        raylets.prestart(node.node_ip_address, node.node_manager_port, job, runtime_env, count, KEEP_SECONDS)
    return WarmAnswer(not lacking, why, runtime_env)
