"""A new run's model, tried with a step in another process while Ray starts: a mistake shows before workers do.

On a machine that waits for Ray this costs nothing, and the process yields to those that train. What it finds ends the
run only where workers would find the same: on CPUs, and mistakes in code rather than what this machine lacks.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

from raytf.config.train_config import TrainConfig
from raytf.data.sources import Source
from raytf.errors import ExactnessError, JobError, RaytfError, WholeBatchError
from raytf.training import elsewhere
from raytf.training.job import TrainingJob

#: Tells the main thread, which waits for Ray, that something was found. A late real-time signal, which nothing else
#: uses.
_FOUND = signal.SIGRTMAX - 3
#: Seconds of one wait for the answer.
_LOOK_SECONDS = 0.3


def is_decisive(error: RaytfError, has_gpus: bool, is_here: bool) -> bool:
    """Whether workers would fail in the same way.

    Args:
        error: of the process that tried.
        has_gpus: workers have some, so that they may do what a CPU cannot.
        is_here: they run on this machine alone.
    """
    if has_gpus or isinstance(error, (WholeBatchError, ExactnessError)):  # which lead to other settings
        return False
    return is_here or not isinstance(error, JobError) or error.is_bug


@contextlib.contextmanager
def rehearsing(job: TrainingJob, train: Source | None, config: TrainConfig) -> Iterator[Rehearsal]:
    """Begin to try a job's model; the process ends with the `with` statement.

    Args:
        job: whose model.
        train: the training data; None tries nothing.
        config: of the run.

    Raises:
        DataError, StorageError: the first records cannot be read.
    """
    if train is None or config.strategy.has_servers:
        yield Rehearsal(None)
        return
    with elsewhere.asked(job, train, job.plan.micro_batch_size, trains=True) as asked:
        yield Rehearsal(asked)


class Rehearsal:
    """A model that is being tried.

    Args:
        asked: the process that tries it; None where none does.
    """

    def __init__(self, asked: elsewhere.Asked | None):
        self._asked = asked
        self._error: RaytfError | None = None
        self._over = threading.Event()

    @contextlib.contextmanager
    def heeded(self, has_gpus: bool, is_here: bool) -> Iterator[None]:
        """While the `with` statement lasts, raise what is found wrong, if workers would fail in the same way.

        Outside the main thread nothing is raised: the workers will.

        Args:
            has_gpus, is_here: see `is_decisive`.
        """
        if self._asked is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(_FOUND, self._raise)
        thread = threading.Thread(
            target=self._watch, args=(self._asked, has_gpus, is_here), daemon=True, name="raytf-rehearsal"
        )
        thread.start()
        try:
            yield
        finally:
            self._over.set()
            thread.join()
            signal.signal(_FOUND, before)

    def _watch(self, asked: elsewhere.Asked, has_gpus: bool, is_here: bool) -> None:
        try:
            while not self._over.is_set():
                if asked.answer(_LOOK_SECONDS) is not None:
                    return
        except RaytfError as error:
            if is_decisive(error, has_gpus, is_here) and not self._over.is_set():
                self._error = error
                signal.pthread_kill(threading.main_thread().ident or 0, _FOUND)

    def _raise(self, number: int, frame: Any) -> None:
        if self._error is not None and not self._over.is_set():
            raise self._error
