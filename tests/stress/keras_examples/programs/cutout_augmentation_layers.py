"""Stands for keras.io/examples/vision/image_classification_with_vision_transformer: augmentation in the model."""
# draws: the augmentation layers

import os
import tempfile

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(1)

SIZE, PATCH, WIDTH, HEADS, CLASSES = 12, 4, 8, 2, 4
PATCHES = (SIZE // PATCH) ** 2

labels = np.random.randint(CLASSES, size=(320, 1))
images = (np.random.uniform(0, 100, size=(320, 8, 8, 3)) + 35 * labels[:, :, None, None]).astype("float32")
x_train, y_train, x_test, y_test = images[:260], labels[:260], images[260:], labels[260:]

augmentation = keras.Sequential(
    [
        layers.Normalization(),
        layers.Resizing(SIZE, SIZE),
        layers.RandomFlip("horizontal"),
        layers.RandomRotation(factor=0.02),
        layers.RandomZoom(height_factor=0.2, width_factor=0.2),
    ],
    name="augmentation",
)
augmentation.layers[0].adapt(x_train)


class Patches(layers.Layer):
    def call(self, images):
        patches = ops.image.extract_patches(images, size=PATCH)
        return ops.reshape(patches, (ops.shape(images)[0], PATCHES, PATCH * PATCH * 3))


class PatchEncoder(layers.Layer):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.projection = layers.Dense(WIDTH)
        self.places = layers.Embedding(PATCHES, WIDTH)

    def call(self, patches):
        return self.projection(patches) + self.places(ops.expand_dims(ops.arange(PATCHES), 0))


inputs = keras.Input((8, 8, 3))
x = PatchEncoder()(Patches()(augmentation(inputs)))
for _ in range(2):
    normed = layers.LayerNormalization(epsilon=1e-6)(x)
    x = layers.Add()([layers.MultiHeadAttention(HEADS, WIDTH)(normed, normed), x])
    hidden = layers.Dense(2 * WIDTH, activation=keras.activations.gelu)(layers.LayerNormalization(epsilon=1e-6)(x))
    x = layers.Add()([layers.Dense(WIDTH, activation=keras.activations.gelu)(hidden), x])
x = layers.Flatten()(layers.LayerNormalization(epsilon=1e-6)(x))
model = keras.Model(inputs, layers.Dense(CLASSES)(layers.Dense(8, activation="gelu")(x)))

model.compile(
    optimizer=keras.optimizers.AdamW(learning_rate=0.001, weight_decay=0.0001),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top-2")],
)
best = os.path.join(tempfile.mkdtemp(), "best.weights.h5")
saving = keras.callbacks.ModelCheckpoint(best, monitor="val_accuracy", save_best_only=True, save_weights_only=True)
options = {"batch_size": 16, "epochs": 2, "validation_split": 0.1, "shuffle": False, "verbose": 0}
history = model.fit(x_train, y_train, callbacks=[saving], **options)
model.load_weights(best)
model.evaluate(x_test, y_test, verbose=0)
print(history.history)
