"""What failed is told from what Ray Train wraps it in: its own classes, as it makes them."""

from __future__ import annotations

import json
import pickle

import pytest
from ray.exceptions import RayActorError, RayTaskError
from ray.train import WorkerGroupError
from ray.train.v2._internal.exceptions import (
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2.api.exceptions import ControllerError

from raytf.driver.supervision.diagnosis import ControllerDiedError, diagnose
from raytf.driver.supervision.failures import Cause, Failure
from raytf.driver.supervision.retry import KernelFailures, Retry, Scene, Supervisor, blamed, judge_launch
from raytf.errors import (
    ClusterError,
    DataError,
    GpuError,
    HangError,
    JobError,
    ProcessDiedError,
    ReplicaError,
    StorageError,
    UnsupportedError,
    WorkerLostError,
)


def node_died(error: RayActorError) -> bool:
    """In the place of the question to Ray, which knows an actor by its id."""
    return error.actor_id == ON_A_DEAD_NODE


ON_A_DEAD_NODE = "0a"


def died(actor: str | None = None, text: str = "its worker process has died") -> WorkerHealthCheckFailedError:
    return WorkerHealthCheckFailedError("a worker health check failed", RayActorError(actor, text))


def job_error(step: int | None) -> JobError:
    error = JobError("a callback raised KeyError: 'a'.")
    error.step = step
    return error


APART, WRONG = (ReplicaError("the weights of rank 0 differ", [0], rank) for rank in (1, 0))
LOST = WorkerLostError("Connection reset")
NCCL = GpuError("NCCL: unhandled system error", "n0", is_doubtful=True)


@pytest.mark.parametrize(
    ("failures", "ranks", "cause", "final", "words"),
    [
        ({0: LOST, 1: died()}, [1], Cause.WORKER_DIED, False, "workers were lost (1 worker process died)"),
        ({0: died(), 1: died()}, [0, 1], Cause.WORKER_DIED, False, "2 worker processes died"),
        ({0: died(ON_A_DEAD_NODE), 2: LOST}, [0], Cause.NODE_LOST, False, "1 worker"),
        ({0: LOST, 3: LOST}, [], Cause.PEER_LOST, False, "a peer does not answer"),
        ({2: HangError("rank 2 ...")}, [2], Cause.HANG, False, "a worker hung (rank 2)"),
        ({0: LOST, 1: job_error(40)}, [1], Cause.ERROR, False, "a callback raised KeyError: 'a'"),
        ({0: job_error(40), 1: died()}, [1], Cause.WORKER_DIED, False, "1 worker process died"),
        ({0: LOST, 1: DataError("labels")}, [1], Cause.ERROR, True, "labels"),
        ({0: StorageError("no answer", "unreachable")}, [0], Cause.STORAGE, False, "StorageError: no answer"),
        ({0: LOST, 1: GpuError("ECC", "n1")}, [1], Cause.GPU, False, "ECC"),
        ({0: NCCL, 1: GpuError("ECC", "n1")}, [1], Cause.GPU, False, "ECC"),
        ({0: NCCL, 1: LOST}, [0], Cause.GPU, False, "NCCL: unhandled system error"),
        ({0: NCCL, 1: died()}, [1], Cause.WORKER_DIED, False, "1 worker process died"),
        ({0: UnsupportedError("int32"), 1: LOST}, [0], Cause.ERROR, True, "int32"),
        ({0: APART, 1: WRONG}, [1], Cause.REPLICAS, False, "the weights of rank 0 differ"),
        ({0: APART, 1: died()}, [1], Cause.WORKER_DIED, False, "1 worker process died"),
        ({0: OSError("odd")}, [0], Cause.OTHER, False, "OSError: odd"),
    ],
)
def test_causes(failures, ranks, cause, final, words):
    failure = diagnose(WorkerGroupError("Training failed", failures), node_died)
    assert (list(failure.ranks), failure.cause, failure.is_final) == (ranks, cause, final)
    assert words in failure.text


@pytest.mark.parametrize("is_seen", [True, False])
def test_who_was_seen_to_compute_wrongly_is_avoided_at_once(is_seen: bool):
    errors = {rank: ReplicaError("rank 1 computes wrongly", [1], rank, is_seen) for rank in (0, 1)}
    failure = diagnose(WorkerGroupError("Training failed", errors))
    assert (failure.ranks, failure.computes_wrongly) == ((1,), is_seen)
    supervisor = Supervisor()
    supervisor.decide(failure, Scene(nodes={0: "a", 1: "b"}))
    assert supervisor.exclusion.excluded(["a", "b", "c"], 0.0) == (["b"] if is_seen else [])


def test_who_is_to_blame_is_known_before_it_has_ended_itself():
    """The first worker that is seen to have ended is another one than that which computes wrongly."""
    errors = {0: ReplicaError("rank 1 computes wrongly", [1], 0, True, ["b"])}
    supervisor = Supervisor()
    supervisor.decide(diagnose(WorkerGroupError("Training failed", errors)), Scene(nodes={0: "a", 1: "b"}))
    assert supervisor.exclusion.excluded(["a", "b", "c"], 0.0) == ["b"]


@pytest.mark.parametrize(
    ("raised", "is_final"),
    [
        (TypeError("'NoneType' is not subscriptable"), True),
        (ZeroDivisionError("division by zero"), True),
        (ModuleNotFoundError("No module named 'pandsa'"), True),
        (json.JSONDecodeError("expecting a value", "", 0), False),  # of a file that was cut off, say
        (ConnectionError("reset by peer"), False),
        (RuntimeError("the callback broke"), False),
        (None, False),
    ],
)
def test_a_mistake_in_the_code_is_not_tried_again(raised, is_final):
    error = pickle.loads(pickle.dumps(JobError("a callback raised it.", "a traceback", raised)))
    error.step = 40
    assert diagnose(WorkerGroupError("Training failed", {0: error})).is_final is is_final


def test_an_error_of_the_job_carries_its_type_text_and_step():
    failure = diagnose(WorkerGroupError("Training failed", {0: job_error(40)}))
    assert (failure.signature, failure.step) == ("JobError: a callback raised KeyError: 'a'.", 40)


def at_start(error: RayActorError) -> ControllerError:
    try:
        raise WorkerGroupStartupFailedError("One of the worker actors failed to initialize") from error
    except WorkerGroupStartupFailedError as failed:
        return ControllerError(failed)


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (at_start(RayActorError(error_msg="The actor died unexpectedly")), Cause.WORKER_DIED),
        (at_start(RayActorError(ON_A_DEAD_NODE)), Cause.NODE_LOST),
        (ControllerError(RayActorError(error_msg="The actor died unexpectedly")), Cause.WORKER_DIED),
        (at_start(RayActorError(error_msg="its creation task raised", actor_init_failed=True)), Cause.START),
    ],
)
def test_a_worker_that_dies_while_its_group_starts_has_died(error, cause):
    """A death counts as no failure of the start, of which five in a row end a run."""
    failure = diagnose(error, node_died)
    assert (failure.ranks, failure.cause) == ((), cause)
    assert cause is Cause.START or failure.text == "workers were lost (a worker process died while its group started)"


def test_a_gpu_that_is_missing_at_the_start_is_told_with_its_node():
    error = ControllerError(WorkerGroupStartupFailedError(GpuError("node x: cuInit: no device.", "n1")))
    error = pickle.loads(pickle.dumps(error))  # on its way to the driver
    failure = diagnose(error)
    assert failure.nodes == {"n1"}
    assert (failure.ranks, failure.cause, failure.is_final) == ((), Cause.GPU, False)
    assert str(failure.error) == "node x: cuInit: no device."
    assert failure.text == "node x: cuInit: no device"


def test_nodes_of_gpus_are_blamed_for_gpus_alone():
    nccl = GpuError("node b: NCCL: unhandled system error", "b", is_doubtful=True)
    died = RayActorError(error_msg="The actor died unexpectedly")
    for errors, nodes in (
        ({0: nccl, 1: died}, ["a"]),
        ({0: nccl, 1: LOST}, ["b", "z"]),
        ({0: nccl, 1: GpuError("node c: ECC", "c")}, ["a", "c"]),
    ):
        assert blamed(diagnose(WorkerGroupError("x", errors)), {0: "z", 1: "a"}) == nodes


def test_a_kernel_that_failed_is_told_apart():
    launch = GpuError("illegal address", "n1", is_launch=True)
    assert diagnose(WorkerGroupError("x", {0: launch, 1: LOST})).is_launch
    assert not diagnose(WorkerGroupError("x", {0: launch, 1: GpuError("ECC", "n2")})).is_launch


def test_a_kernel_that_fails_on_a_second_node_is_the_jobs_fault():
    failure, launches, retry = Failure(Cause.GPU, "illegal address", is_launch=True), KernelFailures(), Retry()
    for nodes in (["a"], ["a"]):
        assert judge_launch(failure, nodes, launches, 0.0) == failure
        assert retry.decide(failure, 5).retry
    assert judge_launch(Failure(Cause.GPU, "ECC"), ["b"], launches, 0.0).cause is Cause.GPU
    final = judge_launch(failure, ["b"], launches, 3599.0)
    assert (final.cause, final.is_final) == (Cause.ERROR, True)
    assert final.text == "illegal address. It also happened on another node's GPU, so the job's own code is at fault"
    assert not retry.decide(final, 9).retry


def test_a_group_for_which_there_is_no_room_yet_waits():
    failure = diagnose(ControllerError(WorkerGroupStartupTimeoutError(2)))
    assert (failure.ranks, failure.cause, failure.is_wait) == ((), Cause.START, True)
    assert failure.text == "Ray found no place for the workers in time"


def test_a_group_that_does_not_start():
    failure = diagnose(ControllerError(WorkerGroupStartupFailedError("one of the actors failed")))
    assert (failure.ranks, failure.cause) == ((), Cause.START)
    assert "one of the actors failed" in failure.text


@pytest.mark.parametrize(
    ("error", "kind", "words", "passes"),
    [
        (WorkerGroupError("x", {0: LOST, 1: DataError("labels")}), DataError, "labels", False),
        (WorkerGroupError("x", {0: LOST, 1: HangError("rank 1")}), WorkerLostError, "Connection reset", False),
        (WorkerGroupError("x", {0: OSError("odd")}), JobError, "training failed for good: OSError: odd", False),
        (ControllerError(OSError("odd")), ClusterError, "training failed: OSError: odd", False),
        (
            ControllerError(RayTaskError("f", "traceback", ModuleNotFoundError("No module named 'mine'"))),
            ClusterError,
            "the workers cannot load the job: No module named 'mine'. Every node needs the job's modules",
            False,
        ),
        (
            ControllerDiedError("gone"),
            ClusterError,
            "Ray Train's controller died: gone; the same command continues",
            True,
        ),
        (ProcessDiedError("the coordinator died"), ClusterError, "training failed: the coordinator died", True),
        (OSError("odd"), ClusterError, "training failed: the group was lost (OSError: odd)", True),
        (RayTaskError("f", "traceback", StorageError("no", "denied")), StorageError, "no", False),
    ],
)
def test_the_last_word_of_a_run_that_ends_with_it(error, kind, words, passes):
    told = diagnose(error).error
    assert type(told) is kind
    assert str(told).startswith(words)
    assert told.passes is passes


def test_a_controller_that_died_is_no_failure_of_the_group():
    failure = diagnose(ControllerDiedError("gone"))
    assert (failure.cause, failure.text, failure.is_final) == (
        Cause.CONTROLLER_DIED,
        "Ray Train's controller died",
        False,
    )
