"""raytf's part in `benchmarks/step/overhead.py`: `raytf.fit` with one worker, in turns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import tyro

import raytf
from benchmarks import models
from benchmarks.peers.keras_fit import CALL_STEPS, RECORDS


@dataclass(frozen=True)
class Job:
    """Train one of the models with raytf."""

    address: str
    """Of the conductor; see turns.py."""
    storage: str
    """Folder for the run."""
    model: str = "cnn"
    """Of benchmarks/models.py."""
    threads: int = 1
    """TensorFlow's threads within an operation."""
    shards: int = 4
    """Logical shards."""
    reduction: str = "float"
    """float or fixed: how gradients are added."""
    jit: bool = False
    """Compile gradients with XLA."""


def main(job: Job) -> None:
    address, name = job.address, job.model

    def build() -> Any:
        import keras

        return models.compiled(keras, name)

    def callbacks(files: str) -> list[Any]:
        import keras

        from benchmarks.peers import keras_fit

        # Of a History raytf knows that it changes nothing, and does not look after each call.
        return [keras_fit.follower(keras, address, base=keras.callbacks.History)]

    config = raytf.TrainConfig.of(
        storage=job.storage,
        workers="1",
        cpus_per_worker=float(job.threads),
        epochs=1_000_000,
        global_batch_size=models.BATCH,
        logical_shards=job.shards,
        steps_per_call=CALL_STEPS,
        reduction=job.reduction,
        jit=job.jit,
        checkpoint_every_seconds=1e6,  # Keras saves nothing either; what a save costs is another benchmark's matter
        snapshot_every_steps=0,
        hang_seconds=0.0,  # a callback waits here while others have their turns
        warm_workers=False,
    )
    raytf.fit(build, models.MODELS[name].data(RECORDS), config=config, callbacks=callbacks)


if __name__ == "__main__":
    main(tyro.cli(Job))
