"""The driver's connection to Ray, and what raytf sets for Ray Train before it connects."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from raytf.cluster.connect import ray_for
from raytf.config.train_config import TrainConfig
from raytf.driver import preflight


@contextlib.contextmanager
def connected(config: TrainConfig) -> Iterator[bool]:
    """Connect to Ray, or start it on this machine. Yields whether it was started here."""
    # By default Ray Train takes one report every 2 s; a poll costs the controller little.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.25")
    # `ScalingPolicy` follows notices of preemption: Ray's watcher would stop the run to wait for the end of the node,
    # and count it as a failure.
    os.environ.setdefault("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", "0")
    # Only nodes that answer are asked for workers; if these still cannot start, look again after this time.
    os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "20")
    with ray_for(lambda: preflight.cpus_here(config), config.run.verbose) as local:
        yield local
