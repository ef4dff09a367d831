"""Inspects worker processes from outside: whether they run, and what they do. Never blocks on a dead node."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raytf._ray import raylets
from raytf._ray.raylets import NodeReply
from raytf.checkpoint import memory_keeper
from raytf.driver.supervision.hang_detector import HangEvidence
from raytf.errors import one_line
from raytf.training.process.heartbeat import STACKS_SIGNAL
from raytf.training.process.heartbeat_types import HeartbeatState

#: Seconds for which a process's CPU use is measured, and the share of a CPU at which the process counts as busy.
_WATCH_SECONDS, _BUSY_SHARE = 0.5, 0.1
#: The evidence that the state of a process provides.
_OF_STATUS = {
    psutil.STATUS_ZOMBIE: HangEvidence.GONE,
    psutil.STATUS_STOPPED: HangEvidence.STOPPED,
    psutil.STATUS_TRACING_STOP: HangEvidence.STOPPED,
    psutil.STATUS_DISK_SLEEP: HangEvidence.BUSY,
}
#: Seconds for a run of py-spy.
_PY_SPY_SECONDS = 4.0
#: Seconds for a process to write its own stacks.
_SIGNAL_SECONDS = 2.0
#: Seconds that a keeper has to inspect processes before a task is sent as well.
_KEEPER_SECONDS = 3.0
#: Seconds that a keeper has to kill processes before a task is sent as well.
_END_SECONDS = 1.0


@dataclass(frozen=True)
class RankInspection:
    """The findings about a rank: evidence, its Python stacks or why there are none, and whether these are final."""

    evidence: HangEvidence | None
    stacks: str
    is_whole: bool = True


class Inspector:
    """Inspects ranks on their nodes, in the background.

    The inspector examines ranks on its own node itself. On other nodes it asks the run's keeper. If there is no keeper,
    or it does not reply soon, the inspector sends a task, which is slower because its process has to start first. On
    this node, evidence is available before the stacks, because py-spy stops a process to read them.
    """

    def __init__(self, run_uri: str, beats: Sequence[HeartbeatState], has_stacks: bool = True):
        self._beats, self._has_stacks = {beat.rank: beat for beat in beats}, has_stacks
        by_node: dict[str, list[HeartbeatState]] = {}
        for beat in beats:
            by_node.setdefault(beat.node, []).append(beat)
        self._answers: dict[str, NodeReply] = {}
        alive = {node["NodeID"]: node for node in ray.nodes() if node["Alive"]}
        self._dead = set(by_node) - set(alive)
        for node in by_node:
            if node in alive:
                threading.Thread(target=self._knock, args=(alive[node],), daemon=True, name="raytf-knock").start()
        self._inspections: dict[int, RankInspection] = {}
        self._here = threading.Thread(target=self._inspect_here, args=(by_node.pop(_own_node(), []),), daemon=True)
        self._here.start()
        self._elsewhere = {node: [(b.rank, b.pid, b.stacks) for b in there] for node, there in by_node.items()}
        self._waiting: dict[Any, str] = {}
        #: Nodes to which no task has been sent yet, and when to send it.
        self._untasked, self._tasks_at = set(self._elsewhere), time.monotonic() + _KEEPER_SECONDS
        for node, processes in self._elsewhere.items():
            keeper = memory_keeper.keeper_on(run_uri, node)
            if keeper is None:
                self._send_task(node)
            else:
                self._waiting[keeper.do.remote(look, processes, has_stacks)] = node

    @property
    def is_complete(self) -> bool:
        return not self._waiting and not self._here.is_alive()

    def collect(self, seconds: float = 0.0) -> dict[int, RankInspection]:
        """Return the findings about each rank so far, after waiting at most this many seconds for more."""
        deadline = time.monotonic() + seconds
        while self._waiting:
            if time.monotonic() >= self._tasks_at:
                for node in self._untasked & set(self._waiting.values()):
                    self._send_task(node)
            done, _ = ray.wait(list(self._waiting), timeout=max(0.0, min(0.2, deadline - time.monotonic())))
            for ref in done:
                self._take(ref)
            for ref, node in list(self._waiting.items()):
                if node in self._dead or self._answers.get(node, NodeReply.LIVES) is not NodeReply.LIVES:
                    del self._waiting[ref]
            if time.monotonic() >= deadline:
                break
        self._here.join(max(0.0, deadline - time.monotonic()))
        return {rank: self._inspections.get(rank) or self._unseen(beat) for rank, beat in self._beats.items()}

    def _send_task(self, node: str) -> None:
        self._untasked.discard(node)
        self._waiting[_by_task(node, look, self._elsewhere[node], self._has_stacks)] = node

    def _take(self, answer: Any) -> None:
        node = self._waiting.pop(answer, None)
        if node is None:  # the node has already replied, through its keeper or a task
            return
        try:
            self._inspections |= ray.get(answer)
        except ray.exceptions.RayError:  # the keeper or the node is gone
            if node in self._untasked:
                self._send_task(node)
            return
        self._waiting = {ref: other for ref, other in self._waiting.items() if other != node}

    def _inspect_here(self, beats: list[HeartbeatState]) -> None:
        def inspect(beat: HeartbeatState) -> None:
            evidence = state(beat.pid)
            self._inspections[beat.rank] = RankInspection(evidence, "no stacks: they did not arrive in time", False)
            if self._has_stacks:
                self._inspections |= [_inspect((beat.rank, beat.pid, beat.stacks))]

        with ThreadPoolExecutor(max(1, len(beats))) as pool:
            list(pool.map(inspect, beats))

    def _unseen(self, beat: HeartbeatState) -> RankInspection:
        if beat.node in self._dead or self._answers.get(beat.node) is NodeReply.REFUSES:
            return RankInspection(HangEvidence.NODE_GONE, "its node is gone")
        if self._answers.get(beat.node) is NodeReply.SILENT:
            return RankInspection(HangEvidence.SILENT_NODE, "its node does not answer")
        return RankInspection(None, "its node did not answer in time")

    def _knock(self, node: dict[str, Any]) -> None:
        self._answers |= raylets.ask([node])


def end(run_uri: str, beats: Sequence[HeartbeatState]) -> None:
    """Send SIGKILL to ranks, including stopped ones, and wait at most one second."""
    own = _own_node()
    asked: dict[Any, HeartbeatState] = {}
    for beat in beats:
        if beat.node == own:
            kill(beat.pid)
        elif (keeper := memory_keeper.keeper_on(run_uri, beat.node)) is not None:
            asked[keeper.do.remote(kill, beat.pid)] = beat
        else:
            _by_task(beat.node, kill, beat.pid)
    if asked:
        for answer in ray.wait(list(asked), num_returns=len(asked), timeout=_END_SECONDS)[0]:
            with contextlib.suppress(ray.exceptions.RayError):  # the keeper died before it killed the rank
                ray.get(answer)
                del asked[answer]
    for beat in asked.values():
        _by_task(beat.node, kill, beat.pid)


def seen_here(beats: Sequence[HeartbeatState]) -> dict[int, HangEvidence]:
    """Return, without waiting, the ranks on this process's node whose processes are gone or stopped by a signal."""
    own = _own_node()
    seen = {beat.rank: at_a_glance(beat.pid) for beat in beats if beat.node == own}
    return {rank: evidence for rank, evidence in seen.items() if evidence in (HangEvidence.GONE, HangEvidence.STOPPED)}


def _own_node() -> str:
    return ray.get_runtime_context().get_node_id()


def _by_task(node: str, function: Any, *arguments: Any) -> Any:
    here = NodeAffinitySchedulingStrategy(node, soft=False)
    return ray.remote(num_cpus=0, max_retries=0)(function).options(scheduling_strategy=here).remote(*arguments)


# -- functions that run on the ranks' node -----------------------------------------------------------------------------


def kill(pid: int) -> None:
    """Kill a process on this machine (SIGKILL), if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def look(processes: list[tuple[int, int, int]], has_stacks: bool = True) -> dict[int, RankInspection]:
    """Inspect processes on this machine, each with its rank, pid, and file descriptor for stacks.

    Do not rename this function: keepers of earlier versions look it up by name.
    """
    with ThreadPoolExecutor(max(1, len(processes))) as pool:
        return dict(pool.map(lambda process: _inspect(process, has_stacks), processes))


def _inspect(process: tuple[int, int, int], has_stacks: bool = True) -> tuple[int, RankInspection]:
    rank, pid, file = process
    evidence = state(pid)
    if evidence is HangEvidence.GONE:
        return rank, RankInspection(evidence, "its process is gone")
    return rank, RankInspection(evidence, stacks(pid, file) if has_stacks else "not requested")


def at_a_glance(pid: int) -> HangEvidence | None:
    """Return the evidence in the state of a process, or None if the process runs or sleeps."""
    try:
        status = psutil.Process(pid).status()
    except psutil.Error:
        return HangEvidence.GONE
    return _OF_STATUS.get(status)


def state(pid: int) -> HangEvidence:
    """Return the evidence about a process, after watching it for half a second if its state is not enough."""
    seen = at_a_glance(pid)
    if seen is not None:
        return seen
    try:
        process = psutil.Process(pid)
        before = sum(process.cpu_times()[:2])
        time.sleep(_WATCH_SECONDS)
        used = sum(process.cpu_times()[:2]) - before
    except psutil.Error:
        return HangEvidence.GONE
    return HangEvidence.BUSY if used >= _BUSY_SHARE * _WATCH_SECONDS else HangEvidence.IDLE


def stacks(pid: int, file: int) -> str:
    """Return the Python stacks of a process, or why there are none.

    If py-spy fails, the process itself writes the stacks to its file descriptor `file` on `STACKS_SIGNAL`.
    """
    text, problem = _py_spy(pid)
    return text or _by_signal(pid, file) or f"no stacks: {problem}"


def _py_spy(pid: int) -> tuple[str, str]:
    # PATH lacks the environment's own folder if the environment is not activated.
    program = shutil.which("py-spy", path=f"{os.path.dirname(sys.executable)}{os.pathsep}{os.environ.get('PATH', '')}")
    if program is None:
        return "", "py-spy is not installed"
    problem = ""
    # Without a pause py-spy may miss threads, so it pauses the process, unless the process is already stopped.
    is_stopped = state(pid) is HangEvidence.STOPPED
    for options in ((), ("--nonblocking",), ("--nonblocking",))[is_stopped:]:
        try:
            command = [program, "dump", *options, "--pid", str(pid)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_SECONDS)
        except (OSError, subprocess.SubprocessError) as error:
            problem = one_line(error, 200)
            continue
        if done.returncode == 0 and "Thread " in done.stdout:
            return done.stdout.strip(), ""
        problem = one_line(done.stderr, 200)
    return "", f"py-spy reported: {problem}"


def _by_signal(pid: int, file: int) -> str:
    path = f"/proc/{pid}/fd/{file}"
    try:
        before = os.stat(path).st_size
        if file < 0 or "raytf-stacks" not in os.readlink(path):
            return ""
        os.kill(pid, STACKS_SIGNAL)
        deadline, size = time.monotonic() + _SIGNAL_SECONDS, before
        while time.monotonic() < deadline:
            time.sleep(0.1)
            size, last = os.stat(path).st_size, size
            if size > before and size == last:
                break
        with open(path, "rb") as stream:
            stream.seek(before)
            return stream.read().decode(errors="replace").strip()
    except OSError:
        return ""
