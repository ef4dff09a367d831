"""Warm processes: on each node as many as it runs workers have imported TensorFlow and wait for the next group.

Most of a restart is Python that starts and TensorFlow that is imported. Ray gives an actor a process that was started
ahead of need and never used, if it has the very runtime environment of the actor. So when a group has trained for some
seconds, each of its nodes is asked for such processes, and a spare node for those of the node that it may replace. A
hook in the runtime environment imports in them what every worker needs, and nothing that a setting of the run decides.
Ray counts them to the job and ends them with it, also when its driver is killed, and they are the first that it ends
when a node's memory runs out. Where one is missing, the worker starts as ever.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import ray

from raytf import _process
from raytf._ray import raylets, worker_process
from raytf.distributed.gpu import visibility

#: What a warm process takes, and what a node keeps free beside them, bytes.
PROCESS_BYTES, SPARE_BYTES = 700 << 20, 2 << 30
#: What `ps` shows of a warm process; Ray writes over it when a worker takes the process.
TITLE = "ray::IDLE raytf warm"
#: All that a worker imports before the user's code. None of them makes an operation, which would fix settings.
_MODULES = (
    "tensorflow",
    "keras",
    "ray.train.collective",
    worker_process.TRAIN_WORKER,
    "raytf.training.worker",
    "raytf.training.loop",
    "raytf.training.synchronous",
)
#: Ray ends the processes with the job; before, never.
KEEP_SECONDS = 10 * 365 * 86400
#: Seconds of training before the next processes are started: a start takes from what the group has to make up for.
_SETTLE_SECONDS = 5.0
#: Seconds after which a process that was asked for and did not come is asked for again.
_START_SECONDS = 60.0


def missing(workers: int, warm: int, free_bytes: int) -> tuple[int, str]:
    """How many more warm processes a node must start, and why not all that it lacks; the reason is empty if it can.

    Args:
        workers: that it runs.
        warm: processes that it has, or has been asked for.
        free_bytes: of its memory.
    """
    lacking = max(0, workers - warm)
    needed = SPARE_BYTES + lacking * PROCESS_BYTES
    if lacking and free_bytes < needed:
        return 0, (
            f"{free_bytes / 2**30:.1f} GiB of its memory are free, and {lacking} would need "
            f"{lacking * PROCESS_BYTES / 2**30:.1f} GiB beside {SPARE_BYTES >> 30} GiB that stay free"
        )
    return lacking, ""


class WarmProcesses:
    """The warm processes of a node for one job, as files: `PID` for each, `asked-ID` for each that is to come.

    Args:
        folder: on the node; need not exist.
        clock: seconds since 1970.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time):
        self._folder, self._clock = folder, clock

    @classmethod
    def here(cls) -> WarmProcesses:
        """That of this process's node and job."""
        context = ray.get_runtime_context()
        return cls(worker_process.session_folder() / "raytf-warm" / f"{context.get_node_id()}-{context.get_job_id()}")

    def ask(self, count: int) -> None:
        """So many are about to be started."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for _ in range(count):
            (self._folder / f"asked-{uuid.uuid4().hex}").touch()

    def claim(self, pid: int) -> bool:
        """This process is one that was asked for; False where none is expected."""
        for asked in self._folder.glob("asked-*"):
            own = self._folder / str(pid)
            try:
                asked.rename(own)
            except FileNotFoundError:  # another one was faster
                continue
            os.utime(own, (self._clock(), self._clock()))
            return True
        return False

    def leave(self, pid: int) -> bool:
        """This process becomes a worker; whether it was a warm one."""
        try:
            (self._folder / str(pid)).unlink()
        except OSError:
            return False
        return True

    def count(self) -> int:
        """Processes that wait, get warm, or are to come. Forgets those that died or never came."""
        found = 0
        for path in self._folder.glob("*"):
            try:
                since = path.stat().st_mtime
                if self._clock() - since < _START_SECONDS if path.name.startswith("asked-") else _lives(path, since):
                    found += 1
                else:
                    path.unlink()
            except FileNotFoundError:
                continue
        return found


def _lives(path: Path, since: float) -> bool:
    try:
        # A younger process has got the number of a dead one.
        return psutil.Process(int(path.name)).create_time() <= since + 1
    except (psutil.NoSuchProcess, ValueError):
        return False


# -- in the driver -----------------------------------------------------------------------------------------------------


def environment(quiet: bool, hidden: bool) -> dict[str, str]:
    """Environment variables of a run's workers with which processes that are started ahead get warm.

    Those that count when a module is imported are among them, since that comes before `worker.set_up`.

    Args:
        quiet: silence TensorFlow's messages.
        hidden: the run's workers have no GPU, and must not even start the driver of one. What gets warm for workers
            with GPUs leaves that open: it has none before a worker takes it.
    """
    # Ray Train's workers have room for one hook: the job's own is called by ours.
    others = (ray.get_runtime_context().runtime_env.get("env_vars") or {}).get(worker_process.HOOK)
    variables = {worker_process.HOOK: worker_process.export_hook(_make_hook(worker_process.driver_paths(), others))}
    variables["KERAS_BACKEND"] = "tensorflow"
    return variables | ({"TF_CPP_MIN_LOG_LEVEL": "3"} if quiet else {}) | (visibility.HIDDEN if hidden else {})


def _make_hook(paths: list[str], others: str | None) -> Callable[[], None]:
    call_others = worker_process.hook_caller(others) if others else None

    def prepare_process() -> None:
        # Sent by value, as nested functions are: the node may find raytf only in the job's own folders, which Ray adds
        # later, or not at all. Ray ends a process whose hook fails, and ours is no reason for that.
        import sys
        import traceback

        if call_others is not None:
            call_others()
        sys.path[:0] = [path for path in paths if path not in sys.path]
        try:
            from raytf.training import warm_pool

            warm_pool.get_warm()
        except Exception:
            traceback.print_exc()  # into Ray's log of the process

    return prepare_process


# -- in a process that was started ahead -------------------------------------------------------------------------------

#: Whether this process was warm, or getting so, when it became a worker.
started_warm = False
#: When this worker made its first step.
_first_step_at: float | None = None


def get_warm() -> None:
    """Import what workers need if this process was started ahead; it can be taken all the while, and is used then."""
    if not WarmProcesses.here().claim(os.getpid()):
        return  # a worker waits for this one
    worker_process.set_title(TITLE)
    import_all()


def import_all() -> None:
    """Import what workers need.

    With the priority of workers: it takes the same CPU time in any case, and beside the programs of a busy machine one
    that is nicer would hardly ever be ready.
    """
    try:
        with _process.uncollected():
            for module in _MODULES:
                importlib.import_module(module)
    except Exception:
        traceback.print_exc()  # into Ray's log; the worker will meet it again and say so


def become_worker() -> None:
    """This process is a worker from now on."""
    global started_warm
    if not ray.is_initialized():  # a benchmark's; to ask for its node would start Ray
        return
    started_warm = WarmProcesses.here().leave(os.getpid())


# -- in a worker, or a task on a spare node ----------------------------------------------------------------------------


def trains() -> None:
    """This worker has made its first step."""
    global _first_step_at
    _first_step_at = time.monotonic()


@dataclasses.dataclass(frozen=True)
class WarmAnswer:
    """What a node says.

    Attributes:
        ready: it has the processes, or cannot have them.
        why: it cannot; else empty.
        runtime_env: the group's; empty as long as it is too early.
    """

    ready: bool
    why: str = ""
    runtime_env: str = ""


def prepare(workers: int, runtime_env: str = "") -> WarmAnswer:
    """Have this node start the warm processes that it lacks; may be called again and again.

    Args:
        workers: that it runs, or may run.
        runtime_env: of the workers; by default that of this process, a worker.
    """
    if not runtime_env:
        if _first_step_at is None or time.monotonic() - _first_step_at < _SETTLE_SECONDS:
            return WarmAnswer(False)
        runtime_env = ray.get_runtime_context().get_runtime_env_string()
    shelf = WarmProcesses.here()
    count, why = missing(workers, shelf.count(), raylets.free_bytes())
    if count:
        shelf.ask(count)
        node, job = worker_process.worker_node(), ray.get_runtime_context().get_job_id()
        raylets.prestart(node.node_ip_address, node.node_manager_port, job, runtime_env, count, KEEP_SECONDS)
    return WarmAnswer(not count, why, runtime_env)
