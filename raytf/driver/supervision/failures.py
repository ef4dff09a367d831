"""What failed, out of what Ray Train wraps it in."""

from __future__ import annotations

from typing import Any

import ray

from raytf._ray.train import WorkerGroupStartupTimeoutError, raised_by
from raytf.driver.supervision.retry import Cause, Failure
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

#: How Ray says that an actor's node is gone.
_NODE_DIED = "its node has died"


def classify(error: Any) -> tuple[list[int], Failure]:
    """Ranks to blame, and what failed."""
    ranks = sorted(getattr(error, "worker_failures", {}))
    errors = dict(zip(ranks, worker_errors(error), strict=True))
    dead = [rank for rank, e in errors.items() if isinstance(e, ray.exceptions.RayActorError)]
    for rank, e in errors.items():
        if not isinstance(e, RaytfError) or e.retryable or (dead and isinstance(e, JobError)):
            continue  # a dying peer can make TensorFlow raise anything
        text, name = one_line(e, 200).rstrip("."), type(e).__name__
        return [rank], Failure(Cause.ERROR, text, f"{name}: {e}", getattr(e, "step", None), not isinstance(e, JobError))
    hung = [rank for rank, e in errors.items() if isinstance(e, HangError)]
    if hung:
        return hung, Failure(Cause.HANG, f"a worker hung (rank {', '.join(map(str, hung))})")
    apart = next((e for e in errors.values() if isinstance(e, ReplicaError)), None)
    if apart is not None and not dead:
        return list(apart.ranks), Failure(Cause.REPLICAS, one_line(apart, 400))
    if dead:
        lost = any(_NODE_DIED in str(errors[rank]) for rank in dead)
        text = f"workers were lost ({len(dead)} worker process{'es' if len(dead) > 1 else ''} died)"
        return dead, Failure(Cause.NODE_LOST if lost else Cause.WORKER_DIED, text)
    told = gpu_errors(error)
    if told:
        broken = [rank for rank, e in errors.items() if e in told]
        return broken, Failure(Cause.GPU, one_line(told[0]).rstrip("."), is_launch=all(e.is_launch for e in told))
    if errors and all(isinstance(e, WorkerLostError) for e in errors.values()):
        return [], Failure(Cause.PEER_LOST, "workers were lost (a peer does not answer)")
    first = next(iter(errors.values()), getattr(error, "controller_failure", error))
    died = _died_at_start(first) if not errors else None
    if died is not None:
        kind = Cause.NODE_LOST if _NODE_DIED in str(died) else Cause.WORKER_DIED
        return [], Failure(kind, "workers were lost (a worker process died while its group started)")
    if isinstance(first, WorkerGroupStartupTimeoutError):
        return [], Failure(Cause.START, "Ray found no place for the workers in time", is_wait=True)
    cause = Cause.STORAGE if isinstance(first, StorageError) else Cause.OTHER if errors else Cause.START
    return list(errors), Failure(cause, f"workers were lost ({type(first).__name__}: {one_line(first, 120)})")


def _died_at_start(error: BaseException) -> ray.exceptions.RayActorError | None:
    """What Ray says of a process that was there and died before its group trained; not of one that could not begin."""
    cause = error if isinstance(error, ray.exceptions.RayActorError) else error.__cause__
    return cause if isinstance(cause, ray.exceptions.RayActorError) and not cause.actor_init_failed else None


def gpu_errors(error: Any) -> list[GpuError]:
    """What is said of GPUs by the ranks of a group, or by a process that did not become a rank for that; the surest."""
    failure = getattr(error, "controller_failure", None)
    told = [e for e in (*worker_errors(error), *getattr(failure, "args", ())) if isinstance(e, GpuError)]
    return [e for e in told if not e.is_doubtful] or told


def worker_errors(error: Exception) -> list[BaseException]:
    """What was raised or happened in each worker, out of what Ray Train wrapped it in, by rank."""
    found = []
    for _, failure in sorted(getattr(error, "worker_failures", {}).items()):
        found.append(raised_by(failure))
    return found
