"""An open file and summary writers of the program, in which callbacks write."""

import json
import os
import tempfile

import keras
import numpy as np
import tensorflow as tf

os.chdir(tempfile.mkdtemp())
keras.utils.set_random_seed(3)
x = np.ones((64, 2), "float32")
model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
model.compile("sgd", "mse")
writer = tf.summary.create_file_writer("logs/metrics")
tf.summary.create_file_writer("logs/default").set_as_default()


class Writes(keras.callbacks.Callback):
    def __init__(self, file):
        super().__init__()
        self.file = file

    def on_epoch_end(self, epoch, logs=None):
        self.file.write(f"{epoch} {logs['loss']:.3f}\n")
        with writer.as_default():
            tf.summary.scalar("mine", logs["loss"], step=epoch)


def rate(epoch):
    tf.summary.scalar("rate", 0.01, step=epoch)
    return 0.01


def tags(folder):
    found = set()
    for name in sorted(os.listdir(folder)):
        for event in tf.compat.v1.train.summary_iterator(os.path.join(folder, name)):
            found |= {(value.tag, event.step) for value in event.summary.value}
    return sorted(found)


with open("log.txt", "w") as file:
    file.write("begin\n")
    hooks = [Writes(file), keras.callbacks.LearningRateScheduler(rate)]
    model.fit(x, x[:, :1], batch_size=32, epochs=2, shuffle=False, verbose=0, callbacks=hooks)
    file.write("end\n")
tf.summary.flush()
with open("log.txt") as file:
    text = file.read()
print("OUTCOME", json.dumps({"text": text, "mine": tags("logs/metrics"), "default": tags("logs/default")}))
