"""Room for a group with parameter servers: as many workers as fit now, or a wait if that is too few."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from raytf._ray import state
from raytf.config.resources import HELPER, possible_workers
from raytf.runs.events import Waiting
from raytf.training.job import TrainingJob

#: Seconds in which a placement group that fits must become ready.
_PLACE_SECONDS = 20.0
#: Seconds between two looks at a cluster that is too small.
_WAIT_SECONDS = 0.5
#: Seconds between two messages about that.
_WAIT_MESSAGE_SECONDS = 60.0
#: Seconds in which Ray frees the resources of processes that have ended.
_FREE_SECONDS = 8.0


@contextlib.contextmanager
def placed(job: TrainingJob, use_gpu: bool, say: Callable[[str], None]) -> Iterator[tuple[Any, int]]:
    """A placement group for as many workers as there is room for, and their number, during the `with` statement."""
    told_at, began = float("-inf"), time.monotonic()
    least, most = job.config.cluster.worker_range
    each = {"CPU": job.config.cluster.cpus, **({"GPU": job.config.cluster.gpus_per_worker} if use_gpu else {})}
    helpers = job.config.strategy.helpers
    while True:
        workers = possible_workers(_free(), each, [HELPER] * helpers, most)
        bundles = _reserve(each, workers, helpers) if workers >= least else None
        if bundles is not None:
            break
        if time.monotonic() - began < _FREE_SECONDS:  # the last group's resources are free in a moment
            time.sleep(_WAIT_SECONDS)
            continue
        if time.monotonic() - told_at >= _WAIT_MESSAGE_SECONDS:
            told_at = time.monotonic()
            job.monitor.book(Waiting(max(0, workers), least))
            say(
                f"waiting: the cluster has room for {max(0, workers)} workers beside {helpers} processes for "
                f"parameter servers and coordinator now, and at least {least} workers are wanted"
            )
        _wait_for(each, least, helpers)
    try:
        yield bundles, workers
    finally:
        _release(bundles)


def _bundles(each: dict[str, float], workers: int, helpers: int) -> Any:
    return placement_group([HELPER] * helpers + [each] * workers, strategy="SPREAD")


def _release(bundles: Any) -> None:
    with contextlib.suppress(ray.exceptions.RayError):
        remove_placement_group(bundles)


def _reserve(each: dict[str, float], workers: int, helpers: int) -> Any:
    """Reserve room for a group.

    Returns:
        The placement group, or None if the room is not there after all.
    """
    bundles = _bundles(each, workers, helpers)
    if bundles.wait(_PLACE_SECONDS):
        return bundles
    _release(bundles)
    return None


def _wait_for(each: dict[str, float], workers: int, helpers: int) -> None:
    """Ask for room, which an autoscaler sees, until it is there or the free resources have changed."""
    wish, before = _bundles(each, workers, helpers), _free()
    try:
        while not wish.wait(_WAIT_SECONDS) and _free() == before:
            pass
    finally:
        _release(wish)
        time.sleep(_WAIT_SECONDS)  # until Ray has freed the room


def _free() -> list[dict[str, float]]:
    """Each node's free CPUs and GPUs."""
    nodes = state.free_resources().values()
    return [{kind: node.get(kind, 0.0) for kind in ("CPU", "GPU")} for node in nodes]
