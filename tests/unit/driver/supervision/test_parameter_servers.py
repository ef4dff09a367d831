"""A group with parameter servers: how many workers there is room for, and what follows which failure."""

import pickle

import pytest
from ray.exceptions import RaySystemError, RayTaskError

from raytf.config.resources import HELPER, possible_workers
from raytf.driver.supervision.diagnosis import diagnose
from raytf.driver.supervision.failures import Cause
from raytf.driver.supervision.retry import Retry
from raytf.errors import HangError, JobError, ModelError, ProcessDiedError, StorageError, WorkerLostError

#: As Ray raises it where an argument of an actor's method cannot be loaded.
NO_MODULE = RayTaskError("coordinate", "traceback", RaySystemError(ModuleNotFoundError("No module named 'mine'")))
NO_MODULE = pickle.loads(pickle.dumps(NO_MODULE)).as_instanceof_cause()

CPU, GPU = {"CPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}


@pytest.mark.parametrize(
    ("free", "each", "helpers", "most", "workers"),
    [
        ([{"CPU": 4.0}], CPU, 2, 4, 2),
        ([{"CPU": 4.0}], CPU, 2, 1, 1),
        ([{"CPU": 2.0}, {"CPU": 2.0}], CPU, 2, 4, 2),
        ([{"CPU": 2.0}], CPU, 2, 2, 0),
        ([{"CPU": 1.0}], CPU, 2, 2, -1),
        ([{"CPU": 1.5}, {"CPU": 3.0}], {"CPU": 3.0}, 1, 2, 1),
        # Helpers do not take the processor that a GPU needs.
        ([{"CPU": 1.0, "GPU": 1.0}, {"CPU": 2.0}], GPU, 2, 2, 1),
        ([{"CPU": 16.0, "GPU": 2.0}], GPU, 2, 2, 2),
        ([{"CPU": 3.0}, {"CPU": 5.0}], {"CPU": 4.0}, 2, 1, 1),
        ([], CPU, 2, 2, -1),
    ],
)
def test_workers_that_fit_beside_the_servers(free, each, helpers, most, workers):
    assert possible_workers(free, each, [HELPER] * helpers, most) == workers


@pytest.mark.parametrize(
    ("error", "cause", "goes_on"),
    [
        (ProcessDiedError("parameter server 0 died"), Cause.WORKER_DIED, True),
        (WorkerLostError("UnavailableError: ..."), Cause.PEER_LOST, True),
        (HangError("no worker has finished a call for 30 s"), Cause.HANG, True),
        (StorageError("cannot read", "unreachable"), Cause.STORAGE, True),
        (StorageError("denied", "denied"), Cause.ERROR, False),
        (ModelError("the model is not compiled"), Cause.ERROR, False),
        (JobError("the callback broke"), Cause.ERROR, True),
        (NO_MODULE, Cause.ERROR, False),
        (RuntimeError("what nobody knows"), Cause.OTHER, True),
    ],
)
def test_what_follows_a_failure_of_a_run_that_has_made_steps(error, cause, goes_on):
    failure = diagnose(error)
    assert failure.cause is cause
    assert Retry().decide(failure, reached=100).retry is goes_on


def test_a_server_that_keeps_dying_without_a_step_gets_longer_pauses():
    retry = Retry()
    died = diagnose(ProcessDiedError("parameter server 0 died"))
    assert [retry.decide(died, reached=5).pause for _ in range(4)] == [0.0, 1.0, 2.0, 4.0]


def test_a_server_that_never_answers_ends_the_run_after_some_attempts():
    retry = Retry()
    silent = diagnose(WorkerLostError("x"))
    decisions = [retry.decide(silent, reached=0).retry for _ in range(6)]
    assert decisions[0]
    assert not decisions[-1]
