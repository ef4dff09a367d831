"""Diagnoses the errors of Ray, Ray Train and raytf: the failure, the error that the user sees, and further attempts."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

import ray
import ray.train
from ray.train import ControllerError, TrainingFailedError, WorkerGroupError

from raytf._ray.state import died_with_node as ask_ray
from raytf._ray.train import WorkerGroupStartupTimeoutError, raised_by
from raytf.config import program
from raytf.driver.supervision.failures import Cause, Errors, Failure, failure_of, lost_to, of_job
from raytf.driver.supervision.retry import Scene, Supervisor
from raytf.errors import (
    ClusterError,
    GpuError,
    HangError,
    JobError,
    ProcessDiedError,
    RaytfError,
    StorageError,
    WorkerLostError,
    one_line,
)
from raytf.training.process.monitor_client import MonitorClient

Outcome = TypeVar("Outcome")
#: Seconds to wait for a reply from the monitor.
_ANSWER_SECONDS = 30.0
#: Returns whether a process died because its node died.
DiedWithNode = Callable[[ray.exceptions.RayActorError], bool]


class ControllerDiedError(RaytfError):
    """The process of Ray Train's controller died; the message is Ray's."""

    retryable = True


def diagnose(error: BaseException, died_with_node: DiedWithNode = ask_ray) -> Failure:
    """Return the failure behind the error that an attempt raised.

    Args:
        died_with_node: returns whether a process died because its node died; asks Ray by default.
    """
    if not isinstance(error, TrainingFailedError):
        return _of_process(_unwrapped(error))
    errors = worker_errors(error)
    dead = [rank for rank, e in errors.items() if isinstance(e, ray.exceptions.RayActorError)]
    with_node = partial(_died_with_node, [errors[rank] for rank in dead], died_with_node)
    failure = failure_of(errors, dead, _gpu_errors(error, errors), with_node) or _at_start(error, died_with_node)
    return replace(failure, error=_last_word(error, errors))


def worker_errors(error: BaseException) -> dict[int, BaseException]:
    """Return the error of each worker, without Ray Train's wrapping, by rank."""
    failures = error.worker_failures if isinstance(error, WorkerGroupError) else {}
    return {rank: raised_by(failure) for rank, failure in sorted(failures.items())}


# -- groups whose ranks report no cause, and what Ray reports ----------------------------------------------------------


def _at_start(error: BaseException, died_with_node: DiedWithNode) -> Failure:
    """Return the failure that kept a group from training before it had ranks."""
    inner = error.controller_failure if isinstance(error, ControllerError) else error
    # The process had started and died before its group trained. A process that could not start is handled below.
    died = inner if isinstance(inner, ray.exceptions.RayActorError) else inner.__cause__
    if isinstance(died, ray.exceptions.RayActorError) and not died.actor_init_failed:
        text = "workers were lost (a worker process died while its group started)"
        is_with_node = _died_with_node([died], died_with_node)
        return Failure(Cause.NODE_LOST if is_with_node else Cause.WORKER_DIED, text)
    if isinstance(inner, WorkerGroupStartupTimeoutError):
        return Failure(Cause.START, "Ray found no place for the workers in time", is_wait=True)
    return Failure(Cause.STORAGE if isinstance(inner, StorageError) else Cause.START, lost_to(inner))


def _died_with_node(dead: list[BaseException], died_with_node: DiedWithNode) -> bool:
    return any(isinstance(e, ray.exceptions.RayActorError) and died_with_node(e) for e in dead)


def _gpu_errors(error: BaseException, errors: Errors) -> list[GpuError]:
    """Return the most certain GPU errors, from the ranks of a group or from a process that could not become a rank."""
    failure = error.controller_failure if isinstance(error, ControllerError) else None
    gpu_errors = [e for e in (*errors.values(), *getattr(failure, "args", ())) if isinstance(e, GpuError)]
    return [e for e in gpu_errors if not e.is_doubtful] or gpu_errors


# -- errors of a single process ----------------------------------------------------------------------------------------


def _of_process(error: BaseException) -> Failure:
    """Return the failure for an error without ranks, raised by a parameter server group or by Ray in a driver."""
    text = one_line(error, 200).rstrip(".")
    own = error if isinstance(error, RaytfError) else None
    missing = _missing_module(error)
    if missing is not None:
        return Failure(Cause.ERROR, one_line(missing).rstrip("."), is_final=True, error=missing)
    match error:
        case ControllerDiedError():
            text = f"Ray Train's controller died: {error}; {program.from_last_checkpoint()}."
            return Failure(Cause.CONTROLLER_DIED, "Ray Train's controller died", error=ClusterError(text, passes=True))
        case ProcessDiedError():
            failed = ClusterError(f"training failed: {text}", passes=True)
            return Failure(Cause.WORKER_DIED, text, error=failed)
        case RaytfError(retryable=False):
            return replace(of_job(error), error=error)
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


def _unwrapped(error: BaseException) -> BaseException:
    """Return another process's original error, without the `RayTaskError` subclass in which Ray wraps it."""
    cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else None
    return error if cause is None else cause


def _missing_module(error: BaseException) -> ClusterError | None:
    inner = _unwrapped(error)
    if isinstance(inner, ray.exceptions.RaySystemError):  # an argument could not be loaded
        inner = inner.client_exc
    if not isinstance(inner, ModuleNotFoundError):
        return None
    return ClusterError(
        f"the workers cannot load the job: {inner}. Every node needs the job's modules: ship them with `ray job "
        "submit --working-dir .`, or install them on the nodes."
    )


def _last_word(error: BaseException, errors: Errors) -> RaytfError:
    """Return the error that the user sees when a run of Ray Train ends."""
    # If one rank fails on an error of its own, the other ranks report that they lost it, which is not the cause.
    for inner in sorted(errors.values(), key=lambda e: getattr(e, "retryable", False)):
        if isinstance(inner, RaytfError):
            return inner
    for inner in errors.values():
        return JobError(f"training failed for good: {type(inner).__name__}: {one_line(inner, 600)}", str(error))
    for broken in _gpu_errors(error, errors):
        return broken
    inner = _unwrapped(error.controller_failure if isinstance(error, ControllerError) else error)
    return _missing_module(inner) or ClusterError(f"training failed: {type(inner).__name__}: {one_line(inner, 600)}")


# -- attempts ----------------------------------------------------------------------------------------------------------


def until_done(
    attempt: Callable[[], Outcome],
    of: tuple[type[Exception], ...],
    monitor: MonitorClient,
    max_failures: int,
    say: Callable[[str], None],
) -> Outcome:
    """Repeat an attempt until it succeeds, and return its outcome.

    Args:
        attempt: runs one attempt, and raises the error that ended it.
        of: errors that end an attempt; any other error ends the run.
        monitor: writes each failure to the ledger.
        max_failures: number of failures after which to retry; negative for no limit.
        say: prints a line for the user.

    Raises:
        RaytfError: another attempt would fail in the same way, or no retries are left.
        RayError: the monitor does not reply, so this process has lost Ray.
    """
    supervisor, allowed = Supervisor(), iter(range(max_failures) if max_failures >= 0 else itertools.count())
    while True:
        try:
            return attempt()
        except of as error:
            failure = diagnose(error)
        scene = Scene(monitor.reached(_ANSWER_SECONDS))
        decision = supervisor.decide(failure, scene, lambda: next(allowed, None) is not None)
        monitor.book(decision.fault)
        if decision.message:
            say(decision.message)
        if not decision.retry:
            raise failure.error or ClusterError(f"training failed: {failure.text}", passes=True) from None
        time.sleep(decision.pause)
