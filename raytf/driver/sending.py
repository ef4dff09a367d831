"""What a run sends to its workers."""

from __future__ import annotations

from collections.abc import Callable

import ray

from raytf.errors import ConfigError
from raytf.training.job import TrainingJob


def check(job: TrainingJob, say: Callable[[str], None]) -> None:
    """Refuse a job that cannot be sent to workers.

    Args:
        job: the run.
        say: called with a line for each object of the program that is not sent.

    Raises:
        ConfigError: says what cannot be pickled.
    """
    try:
        ray.cloudpickle.dumps(job)
    except Exception as error:
        raise ConfigError(
            f"the job cannot be sent to the workers: {type(error).__name__}: {error}. Create what cannot be pickled "
            "(open files, locks, data sets of TensorFlow) inside the model or callbacks function."
        ) from error
    for kind in job.code.left_behind:
        say(f"{kind} stays in this process: a callback or layer that uses it in a worker fails there")
