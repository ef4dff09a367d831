"""A run with parameter servers: one group after another, until one finishes the run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import ray

from raytf.driver.parameter_server.group import ParameterServerGroup, start
from raytf.driver.parameter_server.placement import placed
from raytf.driver.supervision.attempts import Budget, until_done
from raytf.errors import RaytfError
from raytf.runs.events import GroupStart
from raytf.training.job import TrainingJob


def run(job: TrainingJob, use_gpu: bool, say: Callable[[str], None]) -> dict[str, Any] | None:
    """Train a job with parameter servers to its end.

    Args:
        job: to train.
        use_gpu: the workers compute on GPUs.
        say: takes a line for the user.

    Returns:
        Its result.

    Raises:
        RaytfError: another attempt would fail in the same way.
    """

    def attempt() -> dict[str, Any] | None:
        with placed(job, use_gpu, say) as (bundles, workers):
            job.monitor.book(GroupStart(workers))
            job.monitor.begin_group()
            group = ParameterServerGroup(job, start(job, bundles, workers, use_gpu), say)
            with contextlib.closing(group):
                return group.train()

    budget = Budget(job.config.cluster.max_failures)
    return until_done(attempt, (RaytfError, ray.exceptions.RayError), job.monitor, budget, say)
