"""Benchmark 4's peer: keras.callbacks.ModelCheckpoint with save_freq, after Keras's own documentation of it.

`.keras` holds the model with its optimizer, `.weights.h5` the weights and, since the model is compiled, its optimizer's
state too. Keras writes in the training step's thread and does not fsync: its time to durable is that to the file's end.

    python benchmarks/peers/checkpoint_keras.py ADDRESS
"""

from __future__ import annotations

import os
import sys
import tempfile

import keras

from benchmarks.peers.checkpoint_model import Watch, build, folder_bytes
from benchmarks.turns import follow


def main() -> None:
    megabytes, model, update = 0, None, None
    for _, answer in follow(sys.argv[1], 0):
        if answer["megabytes"] != megabytes:
            model = update = None
            megabytes = answer["megabytes"]
            model, update = build(megabytes)
        assert model is not None
        assert update is not None
        with tempfile.TemporaryDirectory(prefix="raytf-keras-", dir=answer["folder"]) as folder:
            weights_only = answer["what"] == ".weights.h5"
            save = keras.callbacks.ModelCheckpoint(
                f"{folder}/model{answer['what']}", save_weights_only=weights_only, save_freq=1
            )
            save.set_model(model)
            save.on_epoch_begin(0)
            watch = Watch(update)
            save.on_train_batch_end(0, {})
            watch.goes_on()
            watch.is_durable(folder_bytes(folder))
            watch.answer["durable"] = watch.answer["stall"]
        answer.update(watch.answer)


if __name__ == "__main__":
    main()
    os._exit(0)
