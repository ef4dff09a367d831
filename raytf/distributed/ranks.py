"""`raytf.rank()` and related functions: which worker this process is, for code that runs in workers."""

from __future__ import annotations

from dataclasses import dataclass

from raytf.errors import RaytfError


@dataclass(frozen=True)
class RankInfo:
    """A worker's place among all workers, and among those of its node."""

    rank: int
    size: int
    local_rank: int
    local_size: int


_place: RankInfo | None = None


def take(place: RankInfo | None) -> None:
    """Make this process that worker from now on; None if it is not a worker any more."""
    global _place
    _place = place


def rank() -> int:
    """Return the number of this worker among all of the run, from 0. Only rank 0 runs callbacks and writes files."""
    return _find("rank").rank


def size() -> int:
    """Return the number of workers of the run now, which changes with a resize.

    The devices of one worker do not count, nor do the workers of parameter servers, which do not run your code. There
    it is 1, and this process is the coordinator.
    """
    return _find("size").size


def local_rank() -> int:
    """Return the number of this worker among the workers on its node of the cluster, from 0."""
    return _find("local_rank").local_rank


def local_size() -> int:
    """Return the number of workers on this worker's node of the cluster."""
    return _find("local_size").local_size


def _find(name: str) -> RankInfo:
    if _place is None:
        raise RaytfError(
            f"raytf.{name}() was called outside of a worker, where there is no rank. Call it in the model function, "
            "in callbacks, in augment or in a source's take(); the driver has no rank, and the number of workers "
            "may change during a run."
        )
    return _place
