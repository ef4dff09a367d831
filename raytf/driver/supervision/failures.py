"""A failure: why an attempt ended, as all that decide about the next one see it. No Ray here."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from raytf.errors import RaytfError


class Cause(enum.StrEnum):
    """Why an attempt ended."""

    WORKER_DIED = "worker_died"
    NODE_LOST = "node_lost"
    HANG = "hang"
    GPU = "gpu"  # one is missing, broken or taken
    PEER_LOST = "peer_lost"  # ranks lost another one, and nobody knows why
    REPLICAS = "replicas"  # the ranks' weights differ
    STORAGE = "storage"
    START = "start"  # the group did not come up
    CONTROLLER_DIED = "controller_died"  # Ray Train's
    OTHER = "other"
    ERROR = "error"  # the job's own code, or what would come again whatever is done


@dataclass(frozen=True)
class Failure:
    """The end of an attempt.

    Attributes:
        text: for people, without a full stop.
        signature: type and text of the job's error; empty for anything else.
        step: at which the job's error came; None before training began.
        is_final: the same code would fail in the same way again.
        is_wait: nothing failed, Ray has only found no place for the workers in time.
        is_launch: a GPU could not do what it was told: the node's fault, or the code's if another node's cannot either.
        ranks: to blame.
        gpu_nodes: Ray's ids of nodes whose GPUs failed, where that is the cause.
        dead: ranks whose processes Ray knows to be dead.
        is_peer_missed: whether that a peer is lost is all that the other ranks say, of those that say anything.
        error: what a person reads if the run ends with this failure.
    """

    cause: Cause
    text: str
    signature: str = ""
    step: int | None = None
    is_final: bool = False
    is_wait: bool = False
    is_launch: bool = False
    ranks: tuple[int, ...] = ()
    gpu_nodes: frozenset[str] = frozenset()
    dead: frozenset[int] = frozenset()
    is_peer_missed: bool = False
    error: RaytfError | None = None
