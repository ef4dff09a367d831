"""Trains on a Ray Dataset whose records are drawn again whenever it is computed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

import raytf

RECORDS = 1200


@dataclass(frozen=True)
class Job:
    """Train on a Ray Dataset."""

    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


def build():
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, activation="softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy")
    return model


def draw(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    x = np.random.default_rng().random((len(batch["id"]), 4), np.float32)
    return {"id": batch["id"], "x": x, "label": (x.sum(1) > 2).astype(np.int64)}


def main(job: Job) -> None:
    import ray

    dataset = ray.data.range(RECORDS, override_num_blocks=7).map_batches(draw).drop_columns(["id"])
    result = raytf.fit(build, dataset, config=job.train)
    print(f"weights_sha256: {result.weights_sha256}")


if __name__ == "__main__":
    raytf.cli(main)
