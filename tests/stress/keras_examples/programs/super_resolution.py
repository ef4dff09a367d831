"""Stands for keras.io/examples/vision/super_resolution_sub_pixel: pairs of images, a callback that predicts."""

import math
import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(1)

SIZE, LOW, FACTOR = 12, 6, 2


def pair(images):
    y = tf.split(tf.image.rgb_to_yuv(images), 3, axis=-1)[0]
    return tf.image.resize(y, [LOW, LOW], method="area"), y


def batches(records):
    images = np.random.randint(0, 256, (records, 4, 4, 3)).repeat(3, 1).repeat(3, 2).astype("float32")
    return tf.data.Dataset.from_tensor_slices(images).batch(16).map(lambda x: x / 255.0).map(pair).prefetch(4)


train_ds, valid_ds = batches(192), batches(48)
test_low, test_high = next(batches(4).as_numpy_iterator())


class DepthToSpace(layers.Layer):
    def call(self, inputs):
        return tf.nn.depth_to_space(inputs, FACTOR)


class Psnr(keras.callbacks.Callback):
    def __init__(self, image):
        super().__init__()
        self.image = image

    def on_epoch_begin(self, epoch, logs=None):
        self.psnr = []

    def on_epoch_end(self, epoch, logs=None):
        print(f"mean PSNR of epoch {epoch}: {np.mean(self.psnr):.2f}")
        assert self.model.predict(self.image, verbose=0).shape == (1, SIZE, SIZE, 1)

    def on_test_batch_end(self, batch, logs=None):
        self.psnr.append(10 * math.log10(1 / logs["loss"]))


same = {"activation": "relu", "kernel_initializer": "orthogonal", "padding": "same"}
inputs = keras.Input(shape=(LOW, LOW, 1))
x = layers.Conv2D(8, 5, **same)(inputs)
x = layers.Conv2D(8, 3, **same)(x)
x = layers.Conv2D(FACTOR**2, 3, **same)(x)
model = keras.Model(inputs, DepthToSpace()(x))

path = str(Path(tempfile.mkdtemp()) / "checkpoint.weights.h5")
callbacks = [
    Psnr(test_low[:1]),
    keras.callbacks.EarlyStopping(monitor="loss", patience=10),
    keras.callbacks.ModelCheckpoint(path, save_weights_only=True, monitor="loss", mode="min", save_best_only=True),
]
model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.001), loss=keras.losses.MeanSquaredError())
history = model.fit(train_ds, epochs=2, callbacks=callbacks, validation_data=valid_ds, verbose=0)

model.load_weights(path)
assert np.isfinite(tf.image.psnr(model.predict(test_low, verbose=0), test_high, max_val=1.0)).all()
print(history.history)
