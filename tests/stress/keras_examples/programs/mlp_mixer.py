"""Stands for keras.io/examples/vision/mlp_image_classification: MLP-Mixer and FNet blocks, one fit each."""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(1)

SIZE, PATCH, WIDTH, CLASSES = 8, 4, 8, 4
PATCHES = (SIZE // PATCH) ** 2

labels = np.random.randint(CLASSES, size=(300, 1))
images = (np.random.uniform(0, 100, size=(300, 6, 6, 3)) + 35 * labels[:, :, None, None]).astype("float32")
x_train, y_train, x_test, y_test = images[:240], labels[:240], images[240:], labels[240:]

scaling = keras.Sequential([layers.Normalization(), layers.Resizing(SIZE, SIZE)])
scaling.layers[0].adapt(x_train)


def two_dense(width):
    return keras.Sequential([layers.Dense(12, activation="gelu"), layers.Dense(width)])


class Mixer(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.over_patches, self.over_channels = two_dense(PATCHES), two_dense(WIDTH)
        self.normalize = layers.LayerNormalization(epsilon=1e-6)

    def call(self, inputs):
        mixed = self.over_patches(ops.transpose(self.normalize(inputs), (0, 2, 1)))
        x = inputs + ops.transpose(mixed, (0, 2, 1))
        return x + self.over_channels(self.normalize(x))


class Fourier(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.dense = two_dense(WIDTH)
        self.first, self.second = layers.LayerNormalization(epsilon=1e-6), layers.LayerNormalization(epsilon=1e-6)

    def call(self, inputs):
        real, _ = ops.fft2((inputs, ops.zeros_like(inputs)))
        x = self.first(inputs + real)
        return self.second(x + self.dense(x))


class Patches(layers.Layer):
    def call(self, images):
        return ops.reshape(ops.image.extract_patches(images, PATCH), (-1, PATCHES, PATCH * PATCH * 3))


for block in (Mixer, Fourier):
    inputs = keras.Input((6, 6, 3))
    x = layers.Dense(WIDTH)(Patches()(scaling(inputs)))
    x = layers.GlobalAveragePooling1D()(keras.Sequential([block(), block()])(x))
    model = keras.Model(inputs, layers.Dense(CLASSES)(x))
    model.compile(
        optimizer=keras.optimizers.AdamW(learning_rate=0.005, weight_decay=0.0001),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=[keras.metrics.SparseCategoricalAccuracy(name="acc"), keras.metrics.SparseTopKCategoricalAccuracy(2)],
    )
    callbacks = [
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=1),
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=2, restore_best_weights=True),
    ]
    options = {"batch_size": 16, "epochs": 2, "validation_split": 0.1, "shuffle": False, "verbose": 0}
    history = model.fit(x_train, y_train, callbacks=callbacks, **options)
    model.evaluate(x_test, y_test, verbose=0)
    print(history.history)
