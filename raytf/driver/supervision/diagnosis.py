"""What failed, judged by what Ray, Ray Train or raytf raised; and the error that the user sees if the run ends."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import ray
import ray.train
from ray.train import ControllerError, TrainingFailedError, WorkerGroupError

from raytf._ray.state import died_with_node as ask_ray
from raytf._ray.train import WorkerGroupStartupTimeoutError, raised_by
from raytf.distributed.member import UnreachableError
from raytf.driver.supervision.failures import Cause, Failure
from raytf.errors import (
    ClusterError,
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

#: Whether a process died because its node did.
DiedWithNode = Callable[[ray.exceptions.RayActorError], bool]


class ProcessDiedError(RaytfError):
    """A process has died without which its group cannot go on; the message says which one."""

    retryable = True


class ControllerDiedError(RaytfError):
    """The process of Ray Train's controller died; the message is Ray's."""

    retryable = True


def diagnose(error: BaseException, died_with_node: DiedWithNode = ask_ray) -> Failure:
    """What failed.

    Args:
        error: of Ray Train, Ray or raytf, as an attempt raised it.
        died_with_node: asks Ray whether a process died because its node did.
    """
    if not isinstance(error, TrainingFailedError):
        return _of_process(_unwrapped(error))
    errors = worker_errors(error)
    dead = [rank for rank, e in errors.items() if isinstance(e, ray.exceptions.RayActorError)]
    found = (
        _final(errors, dead)
        or _hang(errors)
        or _replicas(errors, dead)
        or _death([errors[rank] for rank in dead], died_with_node)
        or _gpu(error, errors)
        or _unreachable(errors)
        or _peer_lost(errors)
        or (_any_other(errors) if errors else _at_start(error, died_with_node))
    )
    missed = bool(errors) and all(isinstance(errors[r], WorkerLostError) for r in errors.keys() - set(dead))
    if found.cause in (Cause.WORKER_DIED, Cause.NODE_LOST):
        found = replace(found, ranks=tuple(dead))
    return replace(found, dead=frozenset(dead), is_peer_missed=missed, error=_last_word(error, errors))


def worker_errors(error: BaseException) -> dict[int, BaseException]:
    """The error of each worker, without Ray Train's wrapping, by rank."""
    found: dict[int, BaseException] = {}
    if isinstance(error, WorkerGroupError):
        for rank, failure in sorted(error.worker_failures.items()):
            found[rank] = raised_by(failure)
    return found


# -- what failed in a group of Ray Train: each function looks for one thing, and the first that finds it decides -------

_Errors = Mapping[int, BaseException]


def _final(errors: _Errors, dead: list[int]) -> Failure | None:
    for rank, error in errors.items():
        if isinstance(error, RaytfError) and not error.retryable and not (dead and isinstance(error, JobError)):
            return replace(_of_job(error), ranks=(rank,))
        # A JobError does not count if a peer has died: a dying peer can make TensorFlow raise anything.
    return None


def _hang(errors: _Errors) -> Failure | None:
    ranks = tuple(rank for rank, error in errors.items() if isinstance(error, HangError))
    if not ranks:
        return None
    return Failure(Cause.HANG, f"a worker hung (rank {', '.join(map(str, ranks))})", ranks=ranks)


def _replicas(errors: _Errors, dead: list[int]) -> Failure | None:
    apart = {rank: error for rank, error in errors.items() if isinstance(error, ReplicaError)}
    if not apart or dead:
        return None
    # Ray's ranks, which are not those of a group that has met again.
    wrong = tuple(rank for rank, error in apart.items() if error.rank in error.ranks)
    first = next(iter(apart.values()))
    nodes = frozenset(node for error in apart.values() for node in error.nodes)
    text, is_proven = one_line(first, 400), first.computes_wrongly
    return Failure(Cause.REPLICAS, text, ranks=wrong, computes_wrongly=is_proven, nodes=nodes)


def _death(dead: list[BaseException], died_with_node: DiedWithNode) -> Failure | None:
    if not dead:
        return None
    text = f"workers were lost ({len(dead)} worker process{'es' if len(dead) > 1 else ''} died)"
    return Failure(_cause_of_death(dead, died_with_node), text)


def _gpu(error: BaseException, errors: _Errors) -> Failure | None:
    told = _gpu_errors(error, errors)
    if not told:
        return None
    return Failure(
        Cause.GPU,
        one_line(told[0]).rstrip("."),
        is_launch=all(e.is_launch for e in told),
        ranks=tuple(rank for rank, e in errors.items() if e in told),
        nodes=frozenset(e.node for e in told if e.node),
    )


def _unreachable(errors: _Errors) -> Failure | None:
    apart = {rank: error for rank, error in errors.items() if isinstance(error, UnreachableError)}
    if not apart:
        return None
    nodes = frozenset(error.node for error in apart.values())
    listed = ", ".join(map(short, sorted(nodes)))
    text = f"workers were left out (the others and they cannot reach each other; node {listed})"
    return Failure(Cause.PEER_LOST, text, ranks=tuple(apart), is_unreachable=True, nodes=nodes)


def _peer_lost(errors: _Errors) -> Failure | None:
    if errors and all(isinstance(error, WorkerLostError) for error in errors.values()):
        return Failure(Cause.PEER_LOST, "workers were lost (a peer does not answer)")
    return None


def _any_other(errors: _Errors) -> Failure:
    first = next(iter(errors.values()))
    cause = Cause.STORAGE if isinstance(first, StorageError) else Cause.OTHER
    return Failure(cause, _lost(first), ranks=tuple(errors))


def _at_start(error: BaseException, died_with_node: DiedWithNode) -> Failure:
    """What kept a group from training; it has no ranks yet."""
    inner = error.controller_failure if isinstance(error, ControllerError) else error
    # A process that had started and died before its group trained; not one that could not start.
    died = inner if isinstance(inner, ray.exceptions.RayActorError) else inner.__cause__
    if isinstance(died, ray.exceptions.RayActorError) and not died.actor_init_failed:
        text = "workers were lost (a worker process died while its group started)"
        return Failure(_cause_of_death([died], died_with_node), text)
    if isinstance(inner, WorkerGroupStartupTimeoutError):
        return Failure(Cause.START, "Ray found no place for the workers in time", is_wait=True)
    return Failure(Cause.STORAGE if isinstance(inner, StorageError) else Cause.START, _lost(inner))


def _cause_of_death(dead: list[BaseException], died_with_node: DiedWithNode) -> Cause:
    with_node = any(isinstance(e, ray.exceptions.RayActorError) and died_with_node(e) for e in dead)
    return Cause.NODE_LOST if with_node else Cause.WORKER_DIED


def _gpu_errors(error: BaseException, errors: _Errors) -> list[GpuError]:
    """Errors about GPUs, from the ranks of a group or from a process that could not become a rank; the surest ones."""
    failure = error.controller_failure if isinstance(error, ControllerError) else None
    told = [e for e in (*errors.values(), *getattr(failure, "args", ())) if isinstance(e, GpuError)]
    return [e for e in told if not e.is_doubtful] or told


def _lost(error: BaseException) -> str:
    return f"workers were lost ({type(error).__name__}: {one_line(error, 120)})"


# -- what one process raised -------------------------------------------------------------------------------------------


def _of_process(error: BaseException) -> Failure:
    """The failure from an error without ranks: of a group with parameter servers, or of Ray under a driver."""
    text = one_line(error, 200).rstrip(".")
    own = error if isinstance(error, RaytfError) else None
    missing = _missing_module(error)
    if missing is not None:
        return Failure(Cause.ERROR, one_line(missing).rstrip("."), is_final=True, error=missing)
    match error:
        case ControllerDiedError():
            told = f"Ray Train's controller died: {error}. The same command goes on from the last checkpoint."
            return Failure(Cause.CONTROLLER_DIED, "Ray Train's controller died", error=ClusterError(told, passes=True))
        case ProcessDiedError():
            failed = ClusterError(f"training failed: {text}", passes=True)
            return Failure(Cause.WORKER_DIED, text, error=failed)
        case RaytfError(retryable=False):
            return replace(_of_job(error), error=error)
        case HangError():
            return Failure(Cause.HANG, text, error=own)
        case GpuError():
            return Failure(Cause.GPU, one_line(error).rstrip("."), error=own)
        case WorkerLostError():
            return Failure(Cause.PEER_LOST, "a parameter server does not answer", error=own)
        case StorageError():
            return Failure(Cause.STORAGE, text, error=own)
    text = f"the group was lost ({type(error).__name__}: {one_line(error, 160)})"
    return Failure(Cause.OTHER, text, error=own or ClusterError(f"training failed: {text}", passes=True))


def _of_job(error: RaytfError) -> Failure:
    text, name = one_line(error, 200).rstrip("."), type(error).__name__
    step = getattr(error, "step", None)
    is_final = not isinstance(error, JobError) or error.is_bug
    return Failure(Cause.ERROR, text, f"{name}: {error}", step, is_final)


def _unwrapped(error: BaseException) -> BaseException:
    """The original error of another process, which Ray wraps in a class of both, with the traceback in its text."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
    return error if cause is None else cause


def _missing_module(error: BaseException) -> ClusterError | None:
    """The error to show if a process could not load the job because a module is missing."""
    inner = _unwrapped(error)
    if isinstance(inner, ray.exceptions.RaySystemError):  # an argument could not be loaded
        inner = inner.client_exc
    if not isinstance(inner, ModuleNotFoundError):
        return None
    return ClusterError(
        f"the workers cannot load the job: {inner}. Every node needs the job's modules: give them with `ray job "
        "submit --working-dir .`, or install them on the nodes."
    )


def _last_word(error: BaseException, errors: _Errors) -> RaytfError:
    """The error that the user sees when a run of Ray Train ends."""
    # If one rank finds something wrong, the others lose it and report that, which is not the cause.
    for inner in sorted(errors.values(), key=lambda e: getattr(e, "retryable", False)):
        if isinstance(inner, RaytfError):
            return inner
    for inner in errors.values():
        return JobError(f"training failed for good: {type(inner).__name__}: {one_line(inner, 600)}", str(error))
    for broken in _gpu_errors(error, errors):
        return broken
    inner = _unwrapped(error.controller_failure if isinstance(error, ControllerError) else error)
    return _missing_module(inner) or ClusterError(f"training failed: {type(inner).__name__}: {one_line(inner, 600)}")
