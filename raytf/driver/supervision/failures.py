"""Find why an attempt failed, from the errors of a group's ranks, and which ranks survive. Nothing here uses Ray."""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from raytf.distributed.membership.member import LeftBehindError, UnreachableError
from raytf.errors import (
    GpuError,
    HangError,
    JobError,
    RaytfError,
    ReplicaError,
    StorageError,
    WorkerLostError,
    one_line,
)
from raytf.runs.events import short

#: The error of each failed rank.
Errors = Mapping[int, BaseException]


class Cause(enum.StrEnum):
    """The reason why an attempt ended."""

    WORKER_DIED = "worker_died"
    NODE_LOST = "node_lost"
    HANG = "hang"
    GPU = "gpu"  # a GPU is missing, broken or taken
    PEER_LOST = "peer_lost"  # ranks lost another one, for an unknown reason
    REPLICAS = "replicas"  # the ranks' weights differ
    STORAGE = "storage"
    START = "start"  # the group did not start
    CONTROLLER_DIED = "controller_died"  # the process of Ray Train's controller died
    OTHER = "other"
    ERROR = "error"  # the job's own code, or an error that a retry would repeat


@dataclass(frozen=True)
class Failure:
    """The end of an attempt.

    Attributes:
        cause: why the attempt ended.
        text: description for the user, without a final period.
        signature: type and text of the job's error; empty for any other failure.
        step: step at which the job's error occurred; None before training started.
        is_final: the same code would fail in the same way again.
        is_wait: nothing failed, but Ray could not place the workers in time.
        is_launch: a GPU failed to run a kernel. The node is at fault, or the code if it also fails on another node.
        ranks: the ranks to blame.
        computes_wrongly: an audit proved that the blamed ranks compute wrongly, so their nodes are avoided at once.
        is_unreachable: the blamed ranks and others cannot reach each other, so the nodes to blame are avoided at once.
        nodes: Ray's ids of nodes that workers reported, because a GPU failed or an audit blames the node.
        dead: ranks whose processes Ray reported as dead.
        is_peer_missed: all ranks that are not dead and report an error report only the loss of a peer.
        error: the error that the user sees if the run ends with this failure.
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


def failure_of(
    errors: Errors, dead: list[int], gpu_errors: Sequence[GpuError], died_with_node: Callable[[], bool]
) -> Failure | None:
    """Return the failure of a group, or None if the errors of its ranks do not show it.

    Args:
        errors: error of each failed rank.
        dead: ranks whose processes are known to be dead.
        gpu_errors: GPU errors, including those of processes that did not become ranks.
        died_with_node: returns whether one of the dead processes died because its node died.
    """
    # The first function that returns a failure decides.
    failure = (
        _final(errors, dead)
        or _hang(errors)
        or _replicas(errors, dead)
        or _death(dead, died_with_node)
        or _gpu(gpu_errors, errors)
        or _unreachable(errors)
        or _peer_lost(errors)
        or (_any_other(errors) if errors else None)
    )
    if failure is None:
        return None
    missed = bool(errors) and all(isinstance(errors[r], WorkerLostError) for r in errors.keys() - set(dead))
    return replace(failure, dead=frozenset(dead), is_peer_missed=missed)


def lost_ranks(failure: Failure, errors: Errors, left: Collection[int]) -> set[int] | None:
    """Return the ranks that are lost while the others continue, or None if all ranks have to restart.

    Workers without a failure can continue after other workers have died, hung, or been left behind.
    """
    if failure.cause not in (Cause.WORKER_DIED, Cause.NODE_LOST, Cause.HANG, Cause.PEER_LOST):
        return None
    # A rank that has lost a peer cannot continue. A rank that was left behind is itself the lost peer.
    if any(isinstance(e, WorkerLostError) and not isinstance(e, LeftBehindError) for e in errors.values()):
        return None
    return {*errors, *left}


def lost_to(error: BaseException) -> str:
    """Return the text for a failure of which only the error is known."""
    return f"workers were lost ({type(error).__name__}: {one_line(error, 120)})"


def of_job(error: RaytfError) -> Failure:
    """Return the failure for an error of the job's own code."""
    text, name = one_line(error, 200).rstrip("."), type(error).__name__
    step = getattr(error, "step", None)
    is_final = not isinstance(error, JobError) or error.is_bug
    return Failure(Cause.ERROR, text, f"{name}: {error}", step, is_final)


def _final(errors: Errors, dead: list[int]) -> Failure | None:
    for rank, error in errors.items():
        if isinstance(error, RaytfError) and not error.retryable and not (dead and isinstance(error, JobError)):
            return replace(of_job(error), ranks=(rank,))
        # A JobError does not count if a peer has died, because that can make TensorFlow raise any error.
    return None


def _hang(errors: Errors) -> Failure | None:
    ranks = tuple(rank for rank, error in errors.items() if isinstance(error, HangError))
    if not ranks:
        return None
    return Failure(Cause.HANG, f"a worker hung (rank {', '.join(map(str, ranks))})", ranks=ranks)


def _replicas(errors: Errors, dead: list[int]) -> Failure | None:
    apart = {rank: error for rank, error in errors.items() if isinstance(error, ReplicaError)}
    if not apart or dead:
        return None
    # Use Ray's ranks: after a new rendezvous, `error.rank` and `error.ranks` may be numbered differently.
    wrong = tuple(rank for rank, error in apart.items() if error.rank in error.ranks)
    first = next(iter(apart.values()))
    nodes = frozenset(node for error in apart.values() for node in error.nodes)
    text, is_proven = one_line(first, 400), first.computes_wrongly
    return Failure(Cause.REPLICAS, text, ranks=wrong, computes_wrongly=is_proven, nodes=nodes)


def _death(dead: list[int], died_with_node: Callable[[], bool]) -> Failure | None:
    if not dead:
        return None
    text = f"workers were lost ({len(dead)} worker process{'es' if len(dead) > 1 else ''} died)"
    return Failure(Cause.NODE_LOST if died_with_node() else Cause.WORKER_DIED, text, ranks=tuple(dead))


def _gpu(gpu_errors: Sequence[GpuError], errors: Errors) -> Failure | None:
    if not gpu_errors:
        return None
    return Failure(
        Cause.GPU,
        one_line(gpu_errors[0]).rstrip("."),
        is_launch=all(e.is_launch for e in gpu_errors),
        ranks=tuple(rank for rank, e in errors.items() if e in gpu_errors),
        nodes=frozenset(e.node for e in gpu_errors if e.node),
    )


def _unreachable(errors: Errors) -> Failure | None:
    apart = {rank: error for rank, error in errors.items() if isinstance(error, UnreachableError)}
    if not apart:
        return None
    nodes = frozenset(error.node for error in apart.values())
    listed = ", ".join(map(short, sorted(nodes)))
    text = f"workers were left out (they and the other workers cannot reach each other; node {listed})"
    return Failure(Cause.PEER_LOST, text, ranks=tuple(apart), is_unreachable=True, nodes=nodes)


def _peer_lost(errors: Errors) -> Failure | None:
    if errors and all(isinstance(error, WorkerLostError) for error in errors.values()):
        return Failure(Cause.PEER_LOST, "workers were lost (a peer does not answer)")
    return None


def _any_other(errors: Errors) -> Failure:
    first = next(iter(errors.values()))
    cause = Cause.STORAGE if isinstance(first, StorageError) else Cause.OTHER
    return Failure(cause, lost_to(first), ranks=tuple(errors))
