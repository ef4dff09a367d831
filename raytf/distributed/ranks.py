"""`raytf.rank()` and its like: which worker this process is, for code that runs in workers."""

from __future__ import annotations

from dataclasses import dataclass

from raytf.errors import RaytfError


@dataclass(frozen=True)
class RankInfo:
    """A worker's place.

    Attributes:
        rank, size: among all workers.
        local_rank, local_size: among those of its node.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int


_place: RankInfo | None = None


def take(place: RankInfo | None) -> None:
    """This process is that worker from now on.

    Returns:
        None for none.
    """
    global _place
    _place = place


def rank() -> int:
    """Number of this worker among all of the run, from 0. Rank 0 alone runs callbacks and writes files."""
    return _find("rank").rank


def size() -> int:
    """Workers of the run now; another number after a resize. Devices of one worker do not count, nor do workers of
    parameter servers, which do not run your code: there it is 1, and this process is the coordinator."""
    return _find("size").size


def local_rank() -> int:
    """Number of this worker among those of its node of the cluster, from 0."""
    return _find("local_rank").local_rank


def local_size() -> int:
    """Workers on this worker's node of the cluster."""
    return _find("local_size").local_size


def _find(name: str) -> RankInfo:
    if _place is None:
        raise RaytfError(
            f"raytf.{name}() was called outside of a worker, where there is no rank. Call it in the model function, "
            "in callbacks, in augment or in a source's take(); the driver knows no ranks, and the number of workers "
            "may change while a run lasts."
        )
    return _place
