"""A failure: why an attempt ended, in the form that all later decisions use. No Ray here."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from raytf.errors import RaytfError


class Cause(enum.StrEnum):
    """Why an attempt ended."""

    WORKER_DIED = "worker_died"
    NODE_LOST = "node_lost"
    HANG = "hang"
    GPU = "gpu"  # a GPU is missing, broken or taken
    PEER_LOST = "peer_lost"  # ranks lost another one, for an unknown reason
    REPLICAS = "replicas"  # the ranks' weights differ
    STORAGE = "storage"
    START = "start"  # the group did not come up
    CONTROLLER_DIED = "controller_died"  # Ray Train's
    OTHER = "other"
    ERROR = "error"  # the job's own code, or an error that would come again in any case


@dataclass(frozen=True)
class Failure:
    """The end of an attempt.

    Attributes:
        cause: why the attempt ended.
        text: for the user, without a full stop.
        signature: type and text of the job's error; empty for any other failure.
        step: at which the job's error occurred; None before training started.
        is_final: the same code would fail in the same way again.
        is_wait: nothing failed, Ray has only found no place for the workers in time.
        is_launch: a GPU failed to run a kernel: the node's fault, or the code's if it fails on another node, too.
        ranks: to blame.
        computes_wrongly: an audit has seen that the ranks to blame do: once is enough to avoid their nodes.
        is_unreachable: the ranks to blame and others cannot reach each other: once is enough to avoid their nodes.
        nodes: Ray's ids of nodes that a worker has named: its GPU failed, or an audit blames it.
        dead: ranks whose processes Ray knows to be dead.
        is_peer_missed: the ranks that report anything only report the loss of a peer.
        error: that the user sees if the run ends with this failure.
    """

    cause: Cause
    text: str
    signature: str = ""
    step: int | None = None
    is_final: bool = False
    is_wait: bool = False
    is_launch: bool = False
    ranks: tuple[int, ...] = ()
    computes_wrongly: bool = False
    is_unreachable: bool = False
    nodes: frozenset[str] = frozenset()
    dead: frozenset[int] = frozenset()
    is_peer_missed: bool = False
    error: RaytfError | None = None
