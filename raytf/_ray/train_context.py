"""A worker's rank, as Ray Train reports it in the worker's process."""

from __future__ import annotations

from typing import Any


def set_rank(context: Any) -> None:
    """Have this process say that it has another rank.

    Args:
        context: Ray Train's DistributedContext.
    """
    from ray.train.v2._internal.execution.context import get_train_context  # Ray Train has imported it

    get_train_context().distributed_context = context
