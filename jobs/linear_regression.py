"""A line through points, with a parameter server: y = 2x + 10.

    python jobs/linear_regression.py                                            # here: one server, two workers
    python jobs/linear_regression.py --sync-replicas --workers 3 --replicas-to-aggregate 2
    ray job submit --working-dir . -- python jobs/linear_regression.py --ps 2 --workers 2:8

The smallest model there is, trained as TensorFlow's guides to parameter servers do: workers compute gradients and do
not wait for each other, one server holds w and b. Expect w within 0.05 of 2 and b within 0.05 of 10, which the job
checks itself; --noise moves the points off the line. Kill a worker meanwhile: nothing stops. Kill the parameter server:
the run goes on from its last checkpoint. docs/guides/parameter-server.md has the rest.
"""

from dataclasses import dataclass, field

import numpy as np

import raytf

#: Of w and b. With the usual noise and number of points the best line itself is off by about 0.002.
WITHIN = 0.05


@dataclass(frozen=True)
class Job:
    """Find the line that points were made with, with parameter servers."""

    records: int = 10_000
    """Points."""
    noise: float = 0.1
    """Standard deviation of what is added to y."""
    learning_rate: float = 0.05
    """Of plain gradient descent."""
    train: raytf.Flags = field(
        default_factory=lambda: raytf.TrainConfig.of(
            strategy="parameter-server", run="linear-regression", global_batch_size=64
        )
    )


def points(records: int, noise: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    x = random.uniform(-1, 1, (records, 1))
    y = 2 * x + 10 + random.normal(0, noise, (records, 1))
    return x.astype("float32"), y.astype("float32")


def build(learning_rate: float):
    import keras

    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(learning_rate), "mse", metrics=["mae"])
    return model


def main(job: Job) -> None:
    if job.records < 1:
        raise raytf.ConfigError(f"--records {job.records}: expected 1 or more.")
    if not job.noise >= 0:
        raise raytf.ConfigError(f"--noise {job.noise}: expected 0 or more.")

    result = raytf.fit(
        lambda: build(job.learning_rate),
        points(job.records, job.noise, seed=1),
        test=points(1000, job.noise, seed=2),
        config=job.train.lasting(epochs=5),
    )
    w, b = (float(value.ravel()[0]) for value in result.load_model().get_weights())
    print(f"w = {w:.4f} (2), b = {b:.4f} (10), {result.document.get('updates', result.steps)} updates")
    if abs(w - 2) > WITHIN or abs(b - 10) > WITHIN:
        raise raytf.JobError(f"the line was not found: expected w and b within {WITHIN}. Give more --epochs.")


if __name__ == "__main__":
    raytf.cli(main)
