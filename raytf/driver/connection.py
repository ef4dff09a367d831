"""The driver's connection to Ray, and the environment variables that raytf sets for Ray Train before it connects.

The connection stays open until the process exits. The next run of a program, or the next cell of a notebook, then
reuses Ray and its warm workers instead of starting them again.
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

#: The context that stays open between runs, its connection, and the CPUs that were requested for a Ray started here.
_kept = contextlib.ExitStack()
_connection: Connection | None = None
_cpus = 0.0


@contextlib.contextmanager
def connected(config: TrainConfig, stage: Callable[[str], None] = lambda text: None) -> Iterator[bool]:
    """Connect to Ray, or start it on this machine. Yield whether it was started here. `stage` displays progress."""
    stage(_described())
    _set_up_ray_train()
    with contextlib.ExitStack() as stack:
        local = stack.enter_context(ray_for(lambda: preflight.cpus_here(config), config.run.verbose))
        sockets.close_connections_with(worker_process.local_sockets())
        yield local
        with _process.working("leaving Ray"):  # this takes seconds if Ray was started here
            stack.close()


@contextlib.contextmanager
def staying_connected(config: TrainConfig, stage: Callable[[str], None] = lambda text: None) -> Iterator[bool]:
    """Connect as `connected` does, but keep the connection open for the next run."""
    global _connection, _cpus
    if not config.cluster.warm_workers:  # no workers would be kept for the next run
        with connected(config, stage) as local:
            yield local
        return
    if _connection is not None and (not _connection.is_current() or preflight.cpus_here(config) > _cpus):
        disconnect()  # the program has left this Ray, or Ray has too few CPUs for this run
    if _connection is None:
        stage(_described())
        # Ray's start is mostly waiting and takes about as long as this import, so run both at once.
        _process.in_thread(lambda: importlib.import_module("raytf.driver.ray_train.run"), "raytf-import")
        _set_up_ray_train()
        _connection = _kept.enter_context(reached(lambda: preflight.cpus_here(config), config.run.verbose))
        _cpus = preflight.cpus_here(config)
        sockets.close_connections_with(worker_process.local_sockets())
    with _connection.watched():
        yield _connection.own is not None


def has_trained() -> bool:
    """Return whether an earlier run of this process left warm workers, so that the next run starts within seconds."""
    return _connection is not None


def disconnect() -> None:
    """Close the connection that was kept open, if there is one."""
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
    # By default, Ray Train takes one report every 2 s. Polling more often costs the controller little.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.25")
    # raytf's `ScalingPolicy` handles preemption notices. Ray's watcher would stop the run, wait until the node is gone,
    # and count this as a failure.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    # Otherwise, Ray Train would also write what callbacks print to its own log.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PRINT_PATCH", "0")
    # raytf requests workers only on nodes that respond. If the workers still cannot start, check again after this time.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20")
