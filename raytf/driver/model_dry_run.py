"""A new run's model, tried with a step in another process while Ray starts: a mistake shows before workers do. The
model of a run that had finished and is trained further, or whose command has changed, is built there and compared.

On two cores a run without a mistake starts one or two seconds later for it; a busy machine, where it would come too
late, tries nothing. An error ends the run only where workers would have the same one: on CPUs, and because of mistakes
in code rather than of what this machine lacks.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from raytf.data.sources import Source
from raytf.errors import ExactnessError, JobError, RaytfError, WholeBatchError
from raytf.training import finished_run, model_probe
from raytf.training.job import TrainingJob

#: Processes for each CPU from which a machine is busy.
_BUSY = 1.5
#: Keys of a runtime environment that may bring packages, or run before anything else.
_PACKAGES = ("pip", "uv", "conda", "container", "image_uri", "worker_process_setup_hook")


def is_busy(load: float, cpus: int) -> bool:
    """Return whether a machine with that load in the last minute would try a model too late."""
    return load > _BUSY * cpus


def has_own_environment(runtime_env: Mapping[str, Any], environ: Mapping[str, str]) -> bool:
    """Return whether workers, with Ray's `runtime_env`, get variables, packages or a hook that this process does not
    have."""
    variables = runtime_env.get("env_vars") or {}
    return any(environ.get(name) != value for name, value in variables.items()) or any(map(runtime_env.get, _PACKAGES))


def is_decisive(error: RaytfError, has_more: bool, is_here: bool) -> bool:
    """Return whether workers would fail in the same way as the process that tried.

    Args:
        has_more: workers have what this process does not: GPUs, or an environment of their own.
        is_here: they run on this machine alone.
    """
    if has_more or isinstance(error, (WholeBatchError, ExactnessError)):  # which lead to other settings
        return False
    return is_here or not isinstance(error, JobError) or error.is_bug


@contextlib.contextmanager
def rehearsing(job: TrainingJob, train: Source | None, before: Mapping[str, str] | None = None) -> Iterator[Rehearsal]:
    """Start to try a job's model; the process ends with the `with` statement.

    Args:
        train: the training data; None tries nothing.
        before: the identity of the run in storage, with whose model it is compared instead of being tried.
    """
    if train is None or job.config.strategy.has_servers or is_busy(os.getloadavg()[0], os.cpu_count() or 1):
        yield Rehearsal(None)
        return
    with model_probe.started(job, train, job.plan.micro_batch_size, trains=before is None) as asked:
        yield Rehearsal(asked, lambda answer: finished_run.check_model(job, before or {}, answer))


class Rehearsal:
    """A model that a process tries; `check` takes the answer, and raises what is wrong with it."""

    def __init__(
        self, asked: model_probe.ModelProbe | None, check: Callable[[Mapping[str, str]], None] = lambda answer: None
    ):
        self._asked, self._check = asked, check

    def poll(self, say: Callable[[str], None], has_more: bool, is_here: bool) -> None:
        """Show what a worker will say of the model, or raise its error if workers would fail in the same way, too (see
        `is_decisive`); never waits."""
        if self._asked is None:
            return
        try:
            answer = self._asked.answer(0)
            if answer is not None:
                self._asked = None
                self._check(answer)
                for line in answer.get(model_probe.REMARKS, "").splitlines():
                    say(line)
        except RaytfError as error:
            self._asked = None
            if is_decisive(error, has_more, is_here):
                raise
