"""What a run sends to its workers."""

from __future__ import annotations

import ray

from raytf.errors import ConfigError
from raytf.training.job import TrainingJob


def check(job: TrainingJob) -> None:
    """Refuse a job that cannot be sent to workers.

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
