"""Runs of models that Keras cannot export or make again, one after another; then each is loaded and used."""

import dataclasses
import json
from dataclasses import dataclass, field

import numpy as np

import raytf


@dataclass(frozen=True)
class Job:
    """Train some models, and load them."""

    kinds: str = "lambda"
    """Names, with commas."""
    policy: str = ""
    """Set it in Keras before all."""
    train: raytf.Flags = field(default_factory=raytf.TrainConfig)


def make(kind: str):
    import keras

    class Secretive(keras.layers.Layer):
        def __init__(self, by):
            super().__init__()
            self.by = by

        def call(self, x):
            self.add_loss(100 * keras.ops.mean(x**2) + 1000)
            return x

    class Nested(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = keras.layers.Dense(3, activity_regularizer="l2")

        def call(self, x):
            h = self.dense(x)
            return {"first": {"a": h, "b": [h, h + 1]}}

        def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
            return keras.ops.mean((y_pred["first"]["a"] - y) ** 2) + keras.ops.sum(self.losses)

    if kind == "nested":
        model = Nested()
    else:
        middle = keras.layers.Lambda(lambda h: 2 * h) if kind == "lambda" else Secretive(object())
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(5), middle, keras.layers.Dense(3)])
    model.compile(keras.optimizers.SGD(1e-3), None if kind == "nested" else "mse")
    return model


def main(job: Job) -> None:
    import keras

    if job.policy:
        keras.config.set_dtype_policy(job.policy)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 8)).astype("float32"), rng.normal(size=(64, 3)).astype("float32")
    for kind in job.kinds.split(","):
        result = raytf.fit(lambda kind=kind: make(kind), (x, y), config=job.train.replace(run=kind))
        from raytf.checkpoint.variables import weights_sha256

        model = result.load_model()
        stranger = dataclasses.replace(result, _model=None)
        own = raytf.load_weights(stranger.path, lambda kind=kind: make(kind))
        keras.utils.set_random_seed(job.train.batch.seed)
        plain = make(kind)
        history = plain.fit(x, y, batch_size=64, epochs=3, shuffle=False, verbose=0).history
        told = {
            "kind": kind,
            "sha256": [result.weights_sha256, weights_sha256(model), weights_sha256(own)],
            "dtype": model.layers[0].compute_dtype,
            "policy": keras.config.dtype_policy().name,
            "first loss": [float(raytf.read_steps(result.path)["loss"][0]), history["loss"][0]],
            "weights": [[w.numpy().ravel().tolist() for w in m.trainable_weights] for m in (model, plain)],
            "export": sorted(result.document["export"]),
        }
        print("TOLD", json.dumps(told), flush=True)


if __name__ == "__main__":
    raytf.cli(main)
