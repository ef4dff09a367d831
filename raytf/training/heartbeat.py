"""A rank's sign of life: once a second it tells the driver where it is in the loop, from a thread of its own."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import ray

from raytf.training.beat import USUAL, Activity, HeartbeatState
from raytf.training.monitor_client import MonitorClient

BEAT_SECONDS = 1.0


#: Has a process write its Python stacks where py-spy may not look into it. A late real-time signal: nobody else's.
STACKS_SIGNAL = signal.SIGRTMAX - 2


#: Calls whose median is the usual step.
_CALLS = 21


#: Bytes above which a sum over the ranks is a transfer, which takes as long as it takes.
_LARGE = 1 << 20


#: Between two measurements of a shard alone: at least so long, and this many times what one takes, so that they cost
#: little.
_PROBE_SECONDS, _PROBE_SHARE = 30.0, 400


class Heartbeat:
    """One rank's sign of life.

    Args:
        monitor: the driver's.
        rank, world_size: of this worker.
    """

    def __init__(self, monitor: MonitorClient, rank: int, world_size: int):
        context = ray.get_runtime_context()
        self._monitor, self._rank, self._world_size = monitor, rank, world_size
        self._node, self._address = context.get_node_id(), ray.util.get_node_ip_address()
        self._group = monitor.group()
        # A file without a name: it is gone with the process, and others of this user find it below /proc.
        self._stacks = os.memfd_create("raytf-stacks")
        faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True)
        self._base = self._activity = Activity.START
        self._since = time.monotonic()
        self._step, self._shards, self._call_steps = 0, 1, 1
        self._advanced_at = self._since
        #: Seconds since the last step that say nothing of the usual one; and in which records were waited for.
        self._aside = self._input = 0.0
        self._lengths: deque[float] = deque(maxlen=_CALLS)
        self._probed_at, self._probe_pause = self._since, 0.0
        self._probes, self._probe_seconds = 0, 0.0
        self._also: list[Callable[[], None]] = []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True, name="raytf-pulse")
        self._thread.start()

    @property
    def step(self) -> int | None:
        """Global steps done; None before training begins."""
        return None if self._base is Activity.START else self._step

    def also(self, look: Callable[[], None]) -> None:
        """Have something done with each beat, which must not wait and raise nothing."""
        self._also.append(look)

    @contextlib.contextmanager
    def doing(self, activity: Activity) -> Iterator[None]:
        """What the rank does inside of the `with` statement; beginning and ending it is progress."""
        before, began = self._activity, time.monotonic()
        self._activity, self._since = activity, began
        try:
            yield
        finally:
            now = time.monotonic()
            if activity is Activity.INPUT:
                self._input += now - began
            elif activity not in USUAL and before is self._base:
                self._aside += now - began
            self._activity, self._since = before, now

    def settle(self, activity: Activity, step: int) -> None:
        """What the rank does from now on where nothing else is said, and the global steps done."""
        self._base = self._activity = activity
        self._step = step
        self._advanced_at = self._since = time.monotonic()

    def progress(self) -> None:
        """There is progress inside of what the rank does."""
        self._since = time.monotonic()

    def advance(self, step: int, steps: int, shards: int) -> None:
        """A call is done.

        Args:
            step: global steps done.
            steps: of the call.
            shards: logical shards that this rank computes of each.
        """
        now = time.monotonic()
        self._lengths.append(max(0.0, now - self._advanced_at - self._aside) / steps)
        self._step, self._call_steps, self._shards = step, steps, shards
        self._advanced_at, self._aside, self._since = now, 0.0, now

    def is_probe_due(self) -> bool:
        """Whether it is time to measure a shard alone; ranks must do that at once, since they wait for each other."""
        return time.monotonic() - self._probed_at >= max(_PROBE_SECONDS, self._probe_pause)

    def probed(self, seconds: float, cost: float) -> None:
        """A shard alone took so long; measuring it, so long."""
        self._probes, self._probe_seconds = self._probes + 1, self._probe_seconds + seconds
        self._probed_at, self._probe_pause = time.monotonic(), cost * _PROBE_SHARE
        self._aside += cost

    def stop(self) -> None:
        """The rank leaves the training function."""
        self._activity = Activity.DONE
        self._stop.set()
        self._monitor.beat(self._now())

    def _beat(self) -> None:
        while not self._stop.is_set():
            try:
                self._monitor.beat(self._now())
                for look in self._also:
                    look()
            except Exception:
                return  # Ray is going down, and with it this process
            self._stop.wait(BEAT_SECONDS)

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


class WatchedGroup:
    """A strategy's Group whose waiting is told to a pulse.

    Args:
        group: as the strategy made it.
        pulse: this rank's.
    """

    def __init__(self, group: Any, pulse: Heartbeat):
        self._group, self._pulse = group, pulse
        self.rank, self.world_size, self.all_reduce = group.rank, group.world_size, group.all_reduce
        self.devices, self.route = group.devices, group.route

    def sum(self, values: np.ndarray) -> np.ndarray:
        with self._pulse.doing(Activity.TRANSFER if values.nbytes > _LARGE else Activity.COLLECTIVE):
            return self._group.sum(values)

    def share(self, data: bytes) -> bytes:
        with self._pulse.doing(Activity.TRANSFER):
            return self._group.share(data)

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        with self._pulse.doing(Activity.TRANSFER):
            return self._group.broadcast(arrays)
