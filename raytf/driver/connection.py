"""The driver's connection to Ray, and what raytf sets for Ray Train before it connects.

It stays until the process ends, so that the next run of a program, or the next cell of a notebook, need not start Ray
again, nor the processes that wait there.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
from collections.abc import Callable, Iterator

from raytf import _process
from raytf._ray import worker_process
from raytf.cluster.connect import Connection, is_connected, ray_for, reached
from raytf.config.train_config import TrainConfig
from raytf.distributed import sockets
from raytf.driver import preflight

#: Contexts that the process keeps open, and the CPUs that its Ray was started with.
_kept = contextlib.ExitStack()
_connection: Connection | None = None
_cpus = 0.0


@contextlib.contextmanager
def connected(config: TrainConfig, stage: Callable[[str], None] = lambda text: None) -> Iterator[bool]:
    """Connect to Ray, or start it on this machine. Yields whether it was started here; `stage` shows what goes on."""
    stage(_described())
    _set_up_ray_train()
    with contextlib.ExitStack() as stack:
        local = stack.enter_context(ray_for(lambda: preflight.cpus_here(config), config.run.verbose))
        sockets.close_connections_with(worker_process.local_sockets())
        yield local
        with _process.working("leaving Ray"):  # which takes seconds for a Ray of this machine
            stack.close()


@contextlib.contextmanager
def staying_connected(config: TrainConfig, stage: Callable[[str], None] = lambda text: None) -> Iterator[bool]:
    """Connect as `connected` does, and keep the connection for the next run after the `with` statement."""
    global _connection, _cpus
    if not config.cluster.warm_workers:  # nothing waits there
        with connected(config, stage) as local:
            yield local
        return
    if _connection is not None and (not _connection.is_current() or preflight.cpus_here(config) > _cpus):
        disconnect()  # Ray is another one, or has too few CPUs for as many workers as are wanted now
    if _connection is None:
        stage(_described())
        # Ray's start is mostly waiting, and this takes as long.
        _process.in_thread(lambda: importlib.import_module("raytf.driver.ray_train.run"), "raytf-import")
        _set_up_ray_train()
        _connection = _kept.enter_context(reached(lambda: preflight.cpus_here(config), config.run.verbose))
        _cpus = preflight.cpus_here(config)
        sockets.close_connections_with(worker_process.local_sockets())
    with _connection.watched():
        yield _connection.own is not None


def has_trained() -> bool:
    """Return whether workers of an earlier run of this process wait, so that a run starts within seconds."""
    return _connection is not None


def disconnect() -> None:
    """Give up the connection that stays, if there is one."""
    global _connection
    _connection = None
    _kept.close()


@atexit.register
def _disconnect_at_exit() -> None:
    if _connection is not None:
        with _process.working("leaving Ray"):
            disconnect()


def _described() -> str:
    return "connecting to Ray" if is_connected() else "starting Ray on this machine"


def _set_up_ray_train() -> None:
    # By default Ray Train takes one report every 2 s; a poll costs the controller little.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.25")
    # `ScalingPolicy` follows notices of preemption: Ray's watcher would stop the run to wait for the end of the node,
    # and count it as a failure.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    # Ray Train would print what a callback prints to the log of its own, too.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
    # Only nodes that answer are asked for workers; if these still cannot start, look again after this time.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20")
