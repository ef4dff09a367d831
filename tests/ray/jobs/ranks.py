"""A job that asks for its rank wherever a job may, and whose workers would begin with other weights than rank 0's."""

import os
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

import raytf


@dataclass(frozen=True)
class Job:
    """Write down who is who."""

    notes: Path = Path("notes")
    """Folder for a line of each worker, and one of each call of a callback."""
    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


def place() -> str:
    return f"{raytf.rank()} of {raytf.size()}, here {raytf.local_rank()} of {raytf.local_size()}"


def main(job: Job) -> None:
    notes = job.notes.absolute()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(512, 8)).astype("float32"), rng.integers(0, 3, 512)
    try:
        raytf.size()
    except raytf.RaytfError as error:
        print(f"in the driver: {error}")

    def build():
        import keras

        node = raytf_node()
        (notes / f"model-{raytf.rank()}").write_text(f"{place()} on {node}")
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)])
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
        if raytf.rank():  # were rank 0's weights not sent to all, the first loss would be NaN
            model.set_weights([np.full_like(w, np.nan) for w in model.get_weights()])
        return model

    def augment(batch, seed):
        (notes / f"augment-{raytf.rank()}").write_text(place())
        return batch

    def callbacks(files: str):
        import keras

        def write(epoch, logs):
            with (notes / "callbacks").open("a") as file:
                file.write(f"{raytf.rank()} {os.getpid()} {epoch} {logs['loss']:.6f}\n")

        return [keras.callbacks.LambdaCallback(on_epoch_end=write)]

    raytf.fit(build, (x, y), config=job.train, callbacks=callbacks, augment=augment)


def raytf_node() -> str:
    import ray

    return ray.get_runtime_context().get_node_id()


if __name__ == "__main__":
    raytf.cli(main)
