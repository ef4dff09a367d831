"""raytf's part in `benchmarks/step/workers.py`: `raytf.fit` as a user calls it, in turns.

Its callback is one that only listens, as Keras's History is, so that ranks need no agreement after each call; it runs
on rank 0, and the others wait for rank 0 in the next step's reduction, at most one micro-batch ahead.
"""

from __future__ import annotations

import os
import signal
import tempfile
from dataclasses import dataclass
from typing import Any

import tyro

import raytf
from benchmarks import models
from benchmarks.peers import common


@dataclass(frozen=True)
class Job(common.Program):
    """Train with raytf."""

    mode: str = "float"
    """float, fixed or exact: how gradients are added."""
    shards: int = 0
    """Logical shards; 0 for raytf's own choice."""


def main(job: Job) -> None:
    address, driver, name, profile = job.address, os.getpid(), job.model, job.profile

    def build() -> Any:
        import keras

        return models.compiled(keras, name)

    def callbacks(files: str) -> list[Any]:
        import keras
        import tensorflow as tf

        from benchmarks import turns

        follower = turns.Follower(address, 0)

        class Turns(keras.callbacks.History):  # type: ignore[misc]
            def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
                was_between = follower.is_between
                if profile and was_between and follower.turns == 2:
                    tf.profiler.experimental.stop()
                if not follower.before(common.CALL_STEPS):
                    os.kill(driver, signal.SIGKILL)  # and Ray with it: nobody wants the end of this run
                if profile and was_between and follower.turns == 2:
                    tf.profiler.experimental.start(profile)

        return [Turns()]

    cores = os.cpu_count() or 1
    config = raytf.TrainConfig.of(
        storage=tempfile.mkdtemp(),
        workers=str(job.workers),
        # One thread each, however few cores there are.
        cpus_per_worker=float(job.threads) if job.workers * job.threads <= cores else cores / job.workers,
        use_gpu=job.use_gpu,
        epochs=100_000,
        global_batch_size=job.batch,
        logical_shards=job.shards or None,
        steps_per_call=common.CALL_STEPS,
        reduction="float" if job.mode == "float" else "fixed",
        exact=job.mode == "exact",
        checkpoint_every_seconds=3600.0,  # peers save nothing either
        hang_seconds=600.0,  # a turn of others takes long
        warm_workers=False,  # memory, which four workers of all peers together are short of
    )
    raytf.fit(build, models.MODELS[name].data(common.RECORDS), config=config, callbacks=callbacks)


if __name__ == "__main__":
    main(tyro.cli(Job))
