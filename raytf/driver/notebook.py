"""In a notebook Ray stays between two calls of `fit`, so that the second one need not start it, nor its processes."""

from __future__ import annotations

import atexit
import contextlib
from collections.abc import Iterator

import ray

from raytf.config.train_config import TrainConfig
from raytf.driver import preflight
from raytf.driver.connection import connected
from raytf.runs.notebook import in_notebook

#: What a notebook keeps until its kernel ends, and the CPUs that its Ray was started with.
_kept = contextlib.ExitStack()
_cpus = 0.0


@contextlib.contextmanager
def staying_connected(config: TrainConfig) -> Iterator[bool]:
    """As `connection.connected`; in a notebook the connection outlives the `with` statement, and is used again."""
    global _cpus
    if not in_notebook():
        with connected(config) as local:
            yield local
        return
    if _cpus and (not ray.is_initialized() or preflight.cpus_here(config) > _cpus):
        _kept.close()  # Ray is gone, or has too few CPUs for as many workers as are wanted now
        _cpus = 0.0
    if not _cpus and not ray.is_initialized():
        _kept.enter_context(connected(config))
        _cpus = preflight.cpus_here(config)
        atexit.register(_kept.close)
    yield bool(_cpus)
