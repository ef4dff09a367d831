"""What a run sends to its workers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray

from raytf.errors import ConfigError, one_line
from raytf.training.job import TrainingJob
from raytf.training.user import user_code


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
        _check_callbacks(job.code.get().callbacks)
        raise ConfigError(
            f"the job cannot be sent to the workers: {type(error).__name__}: {error}. Create what cannot be pickled "
            "(sockets, data sets of TensorFlow that have no end) inside the model or callbacks function."
        ) from error
    for kind in job.code.left_behind:
        say(f"{kind} stays in this process: a callback or layer that uses it in a worker fails there")


def _check_callbacks(callbacks: Any) -> None:
    """Refuse callbacks that hold something that cannot be sent.

    Raises:
        ConfigError: says where it is.
    """
    if not callbacks or callable(callbacks):
        return
    from raytf.training.user import object_graph  # it imports TensorFlow, which the callbacks have done already

    for label, value in object_graph.leaves(callbacks):
        try:
            user_code.packed(value)
        except Exception as error:
            raise ConfigError(
                f"{label} is a {type(value).__name__}, which cannot be sent to the workers ({one_line(error, 200)}). "
                "Create it in the callback's on_train_begin, which runs on a worker."
            ) from error
