"""What is traced in a thread of its own, beside the steps that a worker makes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import keras

from raytf import _keras

T = TypeVar("T")


def start(trace: Callable[[], T]) -> Future[T]:
    """Call a function in a thread, with the global dtype policy of this one: Keras keeps one for each thread.

    A model can only be traced in one thread at a time: tracing changes what its layers keep. So wait for the result
    before anything else traces the model.
    """
    policy = _keras.own_dtype_policy()

    def call() -> T:
        if policy is not None:
            keras.config.set_dtype_policy(policy)
        return trace()

    pool = ThreadPoolExecutor(1, "raytf-trace")
    try:
        return pool.submit(call)
    finally:
        pool.shutdown(wait=False)
