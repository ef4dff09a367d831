"""`raytf.rank()` and related functions, which tell code in workers which worker it runs in."""

from __future__ import annotations

from dataclasses import dataclass

from raytf.errors import RaytfError


@dataclass(frozen=True)
class RankInfo:
    """A worker's place among all workers, and among the workers on its node."""

    rank: int
    size: int
    local_rank: int
    local_size: int


_place: RankInfo | None = None


def take(place: RankInfo | None) -> None:
    """Set which worker this process is, or None if it is no longer a worker."""
    global _place
    _place = place


def rank() -> int:
    """Return the number of this worker among all workers, from 0. Only rank 0 runs callbacks and writes files."""
    return _find("rank").rank


def size() -> int:
    """Return the current number of workers, which changes with a resize.

    A worker counts once, even if it has several devices. With parameter servers, the number is 1: your code runs only
    in the coordinator, not in the workers.
    """
    return _find("size").size


def local_rank() -> int:
    """Return the number of this worker among the workers on its cluster node, from 0."""
    return _find("local_rank").local_rank


def local_size() -> int:
    """Return the number of workers on this worker's cluster node."""
    return _find("local_size").local_size


def _find(name: str) -> RankInfo:
    if _place is None:
        raise RaytfError(
            f"raytf.{name}() was called outside of a worker, where there is no rank. Call it in the model function, "
            "in callbacks, in augment or in a source's take(); the driver has no rank, and the number of workers "
            "may change during a run."
        )
    return _place
