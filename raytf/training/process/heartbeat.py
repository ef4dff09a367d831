"""A rank's heartbeat: once a second, a thread reports the rank's activity and progress to the driver."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import ray

from raytf.errors import brief
from raytf.training.process.heartbeat_types import USUAL, Activity, HeartbeatState
from raytf.training.process.monitor_client import MonitorClient

if TYPE_CHECKING:  # it loads TensorFlow
    from raytf.distributed.allreduce.routes import SumRoute
    from raytf.distributed.group import Group

BEAT_SECONDS = 1.0
#: Signal on which a process writes its Python stacks, for nodes where py-spy may not inspect it. It is one of the
#: highest real-time signals, which nothing else uses.
STACKS_SIGNAL = signal.SIGRTMAX - 2
#: Number of recent calls whose median is the usual duration of a step.
_CALLS = 21
#: Bytes above which a sum over the ranks counts as a transfer, whose duration depends on its size.
_LARGE = 1 << 20
#: Minimum seconds between two measurements of a single shard.
_PROBE_SECONDS = 30.0
#: The time between two measurements is also at least this many times the cost of one, so that training hardly slows.
_PROBE_SHARE = 400


class Heartbeat:
    """Sends one rank's heartbeats.

    Args:
        monitor: the driver's monitor.
        rank, world_size: this worker's rank, and the number of workers.
    """

    def __init__(self, monitor: MonitorClient, rank: int, world_size: int):
        context = ray.get_runtime_context()
        self._monitor, self._rank, self._world_size = monitor, rank, world_size
        self._node, self._address = context.get_node_id(), ray.util.get_node_ip_address()
        self._group = monitor.group()
        # A nameless file disappears with the process, and other processes of this user find it in /proc.
        self._stacks = os.memfd_create("raytf-stacks")
        faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True)
        #: What the rank is doing outside of any `doing`, and what it is doing now.
        self._base = self._activity = Activity.START
        #: Time of the last progress.
        self._since = time.monotonic()
        self._step, self._shards, self._call_steps = 0, 1, 1
        #: When the last call ended.
        self._advanced_at = self._since
        #: Seconds since the last step that do not count towards the usual duration of a step.
        self._excluded = 0.0
        #: Total seconds spent waiting for records.
        self._input = 0.0
        #: Total seconds spent tracing graphs.
        self.trace_seconds = 0.0
        self._lengths: deque[float] = deque(maxlen=_CALLS)
        self._probed_at = self._since
        #: Seconds until the next measurement of a single shard; grows with the cost of the last one.
        self._probe_pause = 0.0
        self._probes, self._probe_seconds = 0, 0.0
        #: Called with each heartbeat.
        self._also: list[Callable[[], None]] = []
        #: Held while a heartbeat is made and sent, so that none arrives after a later one.
        self._order = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="raytf-pulse")
        self._thread.start()

    def take_rank(self, rank: int, world_size: int) -> None:
        self._rank, self._world_size = rank, world_size

    @property
    def group(self) -> int:
        """Return the number of this worker's group, counted by the driver."""
        return self._group

    @property
    def step(self) -> int | None:
        """Return the number of global steps done; None before training begins."""
        return None if self._base is Activity.START else self._step

    def also(self, function: Callable[[], None]) -> None:
        """Call a function with each heartbeat, instead of the function set before; it must not wait."""
        self._also = [function]

    @contextlib.contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        """Set what the rank is doing inside the `with` statement; entering and leaving it count as progress."""
        before, began = self._activity, time.monotonic()
        self._activity, self._since = activity, began
        try:
            yield
        finally:
            now = time.monotonic()
            if activity is Activity.INPUT:
                self._input += now - began
            elif activity is Activity.TRACE:
                self.trace_seconds += now - began
            if activity not in USUAL and before is self._base:
                self._excluded += now - began
            self._activity, self._since = before, now

    def settle(self, activity: Activity, step: int) -> None:
        """Set the rank's activity outside of any `doing`, and the number of global steps done; send both at once.

        Otherwise a stopping driver could think that a training rank is still starting, and no rank would save.
        """
        self._base = self._activity = activity
        self._step = step
        self._advanced_at = self._since = time.monotonic()
        self._send()

    def progress(self) -> None:
        """Note progress within the current activity."""
        self._since = time.monotonic()

    def advance(self, step: int, steps: int, shards: int) -> None:
        """Note that a call is done.

        Args:
            step: number of global steps done.
            steps: number of steps in the call.
            shards: number of logical shards that this rank computes in each step.
        """
        now = time.monotonic()
        self._lengths.append(max(0.0, now - self._advanced_at - self._excluded) / steps)
        self._step, self._call_steps, self._shards = step, steps, shards
        self._advanced_at, self._excluded, self._since = now, 0.0, now

    def is_probe_due(self) -> bool:
        """Return whether it is time to measure a single shard, which all ranks must do at the same step."""
        return time.monotonic() - self._probed_at >= max(_PROBE_SECONDS, self._probe_pause)

    def probed(self, seconds: float, cost: float) -> None:
        """Record a measurement of a single shard.

        Args:
            seconds: duration of the shard.
            cost: seconds that the measurement took.
        """
        self._probes, self._probe_seconds = self._probes + 1, self._probe_seconds + seconds
        self._probed_at, self._probe_pause = time.monotonic(), cost * _PROBE_SHARE
        self._excluded += cost

    def stop(self) -> None:
        """Send a last heartbeat: the rank leaves the training function."""
        self._activity = Activity.DONE
        self._stop.set()
        self._send()

    def _beat(self) -> None:
        keep_calling(
            lambda: [self._send, *self._also], self._stop, lambda: not ray.is_initialized(), self._tell, BEAT_SECONDS
        )

    def _tell(self, error: Exception) -> None:
        self._monitor.say(f"rank {self._rank}: a heartbeat failed; more will follow: {brief(error)}")

    def _send(self) -> None:
        with self._order:
            self._monitor.beat(self._now())

    def _now(self) -> HeartbeatState:
        lengths = list(self._lengths)
        return HeartbeatState(
            group=self._group,
            rank=self._rank,
            world_size=self._world_size,
            node=self._node,
            address=self._address,
            pid=os.getpid(),
            step=self._step,
            activity=self._activity,
            seconds=time.monotonic() - self._since,
            step_seconds=statistics.median(lengths) if lengths else 0.0,
            call_steps=self._call_steps,
            stacks=self._stacks,
            shards=self._shards,
            probes=self._probes,
            probe_seconds=self._probe_seconds,
            input_seconds=self._input,
        )


def keep_calling(
    functions: Callable[[], Sequence[Callable[[], None]]],
    stop: threading.Event,
    is_over: Callable[[], bool],
    tell: Callable[[Exception], None],
    seconds: float,
) -> None:
    """Call functions repeatedly until `stop` is set. A function that raises is called again in the next round.

    Args:
        functions: returns the functions to call.
        is_over: returns whether Ray has shut down. After an error, this is checked and ends the calls.
        tell: called with the first error.
        seconds: pause between two rounds.
    """
    has_reported = False
    while not stop.is_set():
        for function in functions():
            try:
                function()
            except Exception as error:
                if is_over():
                    return
                if not has_reported:
                    with contextlib.suppress(Exception):
                        tell(error)
                has_reported = True
        stop.wait(seconds)


class WatchedGroup:
    """A strategy's Group that reports its waiting as the heartbeat's activity.

    Args:
        group: the strategy's group.
        heartbeat: this rank's heartbeat.
    """

    def __init__(self, group: Group, heartbeat: Heartbeat):
        self._group, self._heartbeat = group, heartbeat
        self.all_reduce, self.devices = group.all_reduce, group.devices

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.world_size

    @property
    def route(self) -> SumRoute | None:
        return self._group.route

    @property
    def loss(self) -> str:
        """Return why the last sum failed, if the ranks can meet again; empty otherwise."""
        return getattr(self._group, "loss", "")

    def sum(self, values: np.ndarray) -> np.ndarray:
        with self._heartbeat.doing(Activity.TRANSFER if values.nbytes > _LARGE else Activity.COLLECTIVE):
            return self._group.sum(values)

    def share(self, data: bytes, giver: int = 0) -> bytes:
        with self._heartbeat.doing(Activity.TRANSFER):
            return self._group.share(data, giver)

    def broadcast(self, arrays: list[np.ndarray], giver: int = 0) -> list[np.ndarray]:
        with self._heartbeat.doing(Activity.TRANSFER):
            return self._group.broadcast(arrays, giver)

    def hand(self, arrays: list[np.ndarray], givers: Sequence[int], takers: Sequence[int]) -> list[np.ndarray]:
        with self._heartbeat.doing(Activity.TRANSFER):
            return self._group.hand(arrays, givers, takers)
