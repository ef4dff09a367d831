"""Warm processes: on each node as many as it runs workers have imported TensorFlow and wait for the next group.

Most of a restart is Python that starts and TensorFlow that is imported. Ray gives an actor a process that was started
ahead of need and never used, if it has the very runtime environment of the actor. So when a group has made its first
step, each of its nodes is asked for such processes, and a spare node for those of the node that it may replace. A hook
in the runtime environment imports in them what every worker needs, and nothing that a setting of the run decides. Ray
counts them to the job and ends them with it, also when its driver is killed, and they are the first that it ends when a
node's memory runs out. Where one is missing, the worker starts as ever.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import threading
import time
import traceback
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private.ray_constants import WORKER_PROCESS_SETUP_HOOK_ENV_VAR as _HOOK
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytf import raylets
from raytf.elastic import fitting

#: What a warm process takes, and what a node keeps free beside them, bytes.
PROCESS_BYTES, SPARE_BYTES = 700 << 20, 2 << 30
#: What `ps` shows of a warm process; Ray writes over it when a worker takes the process.
TITLE = "ray::IDLE raytf warm"
#: All that a worker imports before the user's code. None of them makes an operation, which would fix settings.
_MODULES = (
    "tensorflow",
    "keras",
    "ray.train.collective",
    "ray.train.v2._internal.execution.worker_group.worker",
    "raytf.worker",
    "raytf.callbacks",
    "raytf.checkpoint.durable",
    "raytf.checkpoint.format",
    "raytf.evaluation",
    "raytf.exact",
    "raytf.model",
    "raytf.step",
    "raytf.strategies.multi_worker",
)
#: Ray ends the processes with the job; before, never.
_KEEP_SECONDS = 10 * 365 * 86400
#: Seconds after which a process that was asked for and did not come is asked for again.
_START_SECONDS = 60.0
#: Seconds between two questions to a node: while it lacks processes, and when it has them; and to wait for an answer.
_SOON_SECONDS, _LATER_SECONDS, _ANSWER_SECONDS = 2.0, 60.0, 30.0


def missing(workers: int, warm: int, free_bytes: int) -> tuple[int, str]:
    """How many more warm processes a node shall start, and why not all that it lacks; the reason is empty if it can.

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


class Shelf:
    """The warm processes of a node for one job, as files: `PID` for each, `asked-ID` for each that is to come.

    Args:
        folder: on the node; need not exist.
        clock: seconds since 1970.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time):
        self._folder, self._clock = folder, clock

    @classmethod
    def here(cls) -> Shelf:
        """That of this process's node and job."""
        context = ray.get_runtime_context()
        session = Path(_worker().node.get_session_dir_path())
        return cls(session / "raytf-warm" / f"{context.get_node_id()}-{context.get_job_id()}")

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
        except FileNotFoundError:
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


def _worker() -> Any:
    return ray._private.worker.global_worker


def _lives(path: Path, since: float) -> bool:
    try:
        # A younger process has got the number of a dead one.
        return psutil.Process(int(path.name)).create_time() <= since + 1
    except (psutil.NoSuchProcess, ValueError):
        return False


# -- in the driver -----------------------------------------------------------------------------------------------------


def environment(quiet: bool) -> dict[str, str]:
    """Environment variables of a run's workers with which processes that are started ahead get warm.

    Those that count when a module is imported are among them, since that comes before `worker.set_up`.

    Args:
        quiet: silence TensorFlow's messages.
    """
    from ray._private.runtime_env.setup_hook import decode_function_key

    driver = _worker()
    # Ray Train's workers have room for one hook: the job's own is called by ours.
    others = (ray.get_runtime_context().runtime_env.get("env_vars") or {}).get(_HOOK)
    hook = _make_hook(list(driver.core_worker.get_job_config().py_driver_sys_path), others)
    variables = {_HOOK: decode_function_key(driver.function_actor_manager.export_setup_func(hook, timeout=60))}
    variables["KERAS_BACKEND"] = "tensorflow"
    return variables | ({"TF_CPP_MIN_LOG_LEVEL": "3"} if quiet else {})


def _make_hook(paths: list[str], others: str | None) -> Callable[[], None]:
    def prepare_process() -> None:
        # Sent by value, as nested functions are: a process that fails here is ended, and it may be on a node that
        # finds raytf only in the job's own folders, which Ray adds later.
        import sys

        if others:
            from ray._private.runtime_env.setup_hook import load_and_execute_setup_hook

            error = load_and_execute_setup_hook(others)
            if error:
                raise RuntimeError(error)
        sys.path[:0] = [path for path in paths if path not in sys.path]
        try:
            from raytf import warm
        except ImportError:
            return
        warm.get_warm()

    return prepare_process


# -- in a process that was started ahead -------------------------------------------------------------------------------

#: Whether this process was warm, or getting so, when it became a worker.
started_warm = False
_trains = False


def get_warm() -> None:
    """Import what workers need if this process was started ahead; it can be taken all the while, and is used then."""
    if not Shelf.here().claim(os.getpid()):
        return  # a worker waits for this one
    ray._raylet.setproctitle(TITLE)  # type: ignore[attr-defined]
    import numpy  # noqa: F401  # starts threads, which would inherit the priority below and keep it

    # A thread's own priority ends with it, while a process without privileges could not raise its again.
    thread = threading.Thread(target=_import, name="raytf-warm")
    thread.start()
    thread.join()


def _import() -> None:
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
    try:
        for module in _MODULES:
            importlib.import_module(module)
    except Exception:
        traceback.print_exc()  # into Ray's log; the worker will meet it again and say so


def become_worker() -> None:
    """This process is a worker from now on."""
    global started_warm
    started_warm = Shelf.here().leave(os.getpid())


# -- in a worker, or a task on a spare node ----------------------------------------------------------------------------


def trains() -> None:
    """This worker has made its first step: there is time for other things."""
    global _trains
    _trains = True


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a node says.

    Attributes:
        ready: it has the processes, or cannot have them.
        why: it cannot; else empty.
        runtime_env: the group's; empty as long as it has not made a step.
    """

    ready: bool
    why: str = ""
    runtime_env: str = ""


def prepare(workers: int, runtime_env: str = "") -> Answer:
    """Have this node start the warm processes that it lacks; may be called again and again.

    Args:
        workers: that it runs, or may run.
        runtime_env: of the workers; by default that of this process, a worker.
    """
    if not runtime_env:
        if not _trains:
            return Answer(False)
        runtime_env = ray.get_runtime_context().get_runtime_env_string()
    shelf = Shelf.here()
    count, why = missing(workers, shelf.count(), _free_bytes())
    if count:
        shelf.ask(count)
        node, job = _worker().node, ray.get_runtime_context().get_job_id()
        raylets.prestart(node.node_ip_address, node.node_manager_port, job, runtime_env, count, _KEEP_SECONDS)
    return Answer(not count, why, runtime_env)


def _free_bytes() -> int:
    from ray._private.utils import estimate_available_memory

    # Of the machine, where files that are cached count as free; of a container, whose limit the machine does not know.
    return min(psutil.virtual_memory().available, estimate_available_memory())


# -- in Ray Train's controller -----------------------------------------------------------------------------------------


class Schedule:
    """When to ask which node. No Ray here.

    Args:
        clock: seconds, of any clock that only goes forward.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._asked: dict[str, float] = {}
        self._ready: set[str] = set()
        self._waiting: set[str] = set()

    def restart(self) -> None:
        """There is a new group: nothing is known of any node."""
        self._asked.clear()
        self._ready.clear()
        self._waiting.clear()

    def due(self, nodes: list[str]) -> list[str]:
        """Those that shall be asked now; they are taken as asked."""
        now, found = self._clock(), []
        for node in nodes:
            patience = (
                _ANSWER_SECONDS if node in self._waiting else _LATER_SECONDS if node in self._ready else _SOON_SECONDS
            )
            if now - self._asked.get(node, float("-inf")) >= patience:
                self._asked[node] = now
                self._waiting.add(node)
                found.append(node)
        return found

    def answered(self, node: str, ready: bool) -> None:
        """A node has said whether it has all that it shall have."""
        self._waiting.discard(node)
        (self._ready.add if ready else self._ready.discard)(node)


def spare_nodes(room: dict[str, int], group: dict[str, int]) -> dict[str, int]:
    """Nodes that may take the place of one of a group's, and how many workers each would run.

    Enough of them for the workers of the node that runs most; the others stay as they are.

    Args:
        room: workers that fit into what is free now on each living node, in Ray's order.
        group: workers on each of its nodes.
    """
    wanted, found = max(group.values(), default=0), {}
    for node, fits in room.items():
        if wanted > 0 and fits > 0 and node not in group:
            found[node] = min(fits, wanted)
            wanted -= found[node]
    return found


class Keeper:
    """Keeps the nodes of a run, and a spare one, supplied with warm processes.

    Args:
        resources: of each worker.
        say: told, once for each node, why it has none.
    """

    def __init__(self, resources: dict[str, float], say: Callable[[str], None]):
        self._resources, self._say = resources, say
        self._schedule = Schedule()
        self._group: list[Any] = []
        self._runtime_env = ""
        self._has_helper = False
        self._answers: dict[Any, str] = {}
        self._told: set[str] = set()

    def keep(self, workers: list[Any], staying: set[str]) -> None:
        """Look after it; call it often while a group trains. Waits for nothing.

        Args:
            workers: Ray Train's.
            staying: nodes that live and are not about to go.
        """
        group = [worker.actor for worker in workers]
        if group != self._group:
            self._group, self._answers, self._has_helper = group, {}, False
            self._schedule.restart()
        self._collect()
        counts = Counter(worker.metadata.node_id for worker in workers)
        speakers = {worker.metadata.node_id: worker for worker in workers}
        for node in self._schedule.due([node for node in counts if node in staying]):
            self._answers[speakers[node].execute_async(prepare, counts[node])] = node
        if self._runtime_env and self._schedule.due(["the spare nodes"]):
            self._schedule.answered("the spare nodes", False)
            spares = spare_nodes(self._room(staying), counts)
            for node in self._schedule.due(list(spares)):
                there = NodeAffinitySchedulingStrategy(node, soft=False)
                task: Any = ray.remote(num_cpus=0, max_retries=0)(prepare).options(scheduling_strategy=there)
                self._answers[task.remote(spares[node], self._runtime_env)] = node

    def _room(self, staying: set[str]) -> dict[str, int]:
        free = ray._private.state.available_resources_per_node()
        return {node: fitting(has, self._resources) for node, has in free.items() if node in staying}

    def _start_helper(self) -> None:
        # Each group has an actor of Ray Train beside it, on the controller's node; the next one's finds a process too.
        context, node = ray.get_runtime_context(), _worker().node
        env = context.get_runtime_env_string()
        raylets.prestart(node.node_ip_address, node.node_manager_port, context.get_job_id(), env, 1, _KEEP_SECONDS)
        self._has_helper = True

    def _collect(self) -> None:
        if not self._answers:
            return
        for ref in ray.wait(list(self._answers), num_returns=len(self._answers), timeout=0)[0]:
            node = self._answers.pop(ref)
            try:
                answer: Answer = ray.get(ref)
            except ray.exceptions.RayError:  # it died, and the group will be replaced
                continue
            if answer.runtime_env and not self._has_helper:
                self._start_helper()
            self._schedule.answered(node, answer.ready)
            self._runtime_env = answer.runtime_env or self._runtime_env
            if answer.why and node not in self._told:
                self._told.add(node)
                self._say(f"no warm processes on node {node[:8]}, so a restart takes longer: {answer.why}")
