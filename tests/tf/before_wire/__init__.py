"""A run of commit 35a2e22, from before whole numbers had two forms: its checkpoint after 2 of 4 steps, and its end.

    python -m tests.tf.before_wire FOLDER        # such runs by the raytf that is installed, two workers each

Its arithmetic is exact: whole numbers, and powers of two to multiply with. So the weights at its end are the same on
every machine, and the checkpoints in this folder and the hashes below, which that commit wrote, bind all later ones.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parent
BATCH, SHARDS, SAVED, STEPS = 8, 4, 2, 4
#: `weights_sha256` after STEPS, without compression and with it.
ENDS = {
    "whole": "83ea4a04f0017311075a49af1882fc97dc5539f90a8b2383bead22a128a9eac5",
    "compressed": "76e30ce1f59e611ce6efffe470390d3975e9b2d58f4f0eb7bb194617e163e037",
}


def arrays() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.integers(-1, 2, (64, 5)).astype(np.float32)
    return x, random.integers(-2, 3, (64, 2)).astype(np.float32)


def build() -> Any:
    import keras

    line = keras.layers.Dense(2, use_bias=False, kernel_initializer="zeros", name="line")
    model = keras.Sequential([keras.Input((5,)), line], name="sequential")  # as Keras names the first of a process
    model.compile(keras.optimizers.SGD(0.5, momentum=0.5), "mse")
    return model


def record(storage: str) -> None:
    import raytf

    for name in ("whole", "compressed"):
        for steps in (SAVED, STEPS):
            config = raytf.TrainConfig.of(
                run=name,
                storage=storage,
                steps=steps,
                workers="2",
                global_batch_size=BATCH,
                logical_shards=SHARDS,
                compress_gradients=name == "compressed",
            )
            print(name, steps, raytf.fit(build, arrays(), config=config).weights_sha256, flush=True)
