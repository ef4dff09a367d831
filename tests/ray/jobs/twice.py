"""Two runs of one process: what runs beside them, whether they have one Ray; and a third one on the program's own."""

from __future__ import annotations

import contextlib
import json
import os
import sys

import keras
import numpy as np
import psutil
import ray

import raytf
from raytf.testing.processes import WARM, titled, wait_until


class WaitForNext(keras.callbacks.Callback):
    """Goes on when the processes of the next group are there."""

    def on_epoch_end(self, epoch, logs=None):
        raylet = psutil.Process().parent()
        wait_until(lambda: titled(raylet.children(), WARM), "there is a warm process", 120)


def main() -> None:
    x = np.arange(32, dtype="float32").reshape(8, 4)
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    jobs, commands = [], []
    for run in ("first", "second"):
        config = raytf.TrainConfig.of(storage=sys.argv[1], workers="1", run=run)
        raytf.fit(model, x, x[:, :1], epochs=1, callbacks=lambda files: [WaitForNext()], config=config)
        jobs.append(ray.get_runtime_context().get_job_id())
        commands.append([])
        for process in psutil.Process(os.getpid()).children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                commands[-1].append(" ".join(process.cmdline()))
    ray.shutdown()
    ray.init(num_cpus=2, include_dashboard=False, logging_level="error", log_to_driver=False)
    own = ray.nodes()[0]["NodeID"]
    config = raytf.TrainConfig.of(storage=sys.argv[1], workers="1", run="third")
    raytf.fit(model, x, x[:, :1], epochs=1, config=config)
    is_left = ray.is_initialized() and ray.nodes()[0]["NodeID"] == own
    print("TOLD", json.dumps([jobs[0] == jobs[1], is_left, commands]))


if __name__ == "__main__":
    main()
