"""Stands for keras.io/examples/vision/oxford_pets_image_segmentation: a U-Net of Xception blocks fed by a PyDataset."""

import os
import tempfile

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(1)

SIZE, CLASSES = 16, 3

images = np.random.uniform(0, 60, size=(208, SIZE, SIZE, 3)).astype("float32")
masks = np.zeros((208, SIZE, SIZE, 1), dtype="uint8")
for image, mask, corner in zip(images, masks, np.random.randint(0, 8, size=(208, 2)), strict=True):
    row, column = corner
    mask[row : row + 8, column : column + 8] = 2
    mask[row + 1 : row + 7, column + 1 : column + 7] = 1
    image += 80 * mask


class Pets(keras.utils.PyDataset):
    def __init__(self, images, masks, batch_size=16, **kwargs):
        super().__init__(**kwargs)
        self.images, self.masks, self.batch_size = images, masks, batch_size

    def __len__(self):
        return len(self.masks) // self.batch_size

    def __getitem__(self, index):
        chosen = slice(index * self.batch_size, (index + 1) * self.batch_size)
        return self.images[chosen] / 255.0, self.masks[chosen]


inputs = keras.Input((SIZE, SIZE, 3))
x = layers.Conv2D(4, 3, strides=2, padding="same")(inputs)
x = layers.Activation("relu")(layers.BatchNormalization()(x))
before = x
for filters in (8, 12):
    for _ in range(2):
        x = layers.SeparableConv2D(filters, 3, padding="same")(layers.Activation("relu")(x))
        x = layers.BatchNormalization()(x)
    x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
    x = before = layers.add([x, layers.Conv2D(filters, 1, strides=2, padding="same")(before)])
for filters in (12, 8, 4):
    for _ in range(2):
        x = layers.Conv2DTranspose(filters, 3, padding="same")(layers.Activation("relu")(x))
        x = layers.BatchNormalization()(x)
    x = layers.UpSampling2D(2)(x)
    shortcut = layers.Conv2D(filters, 1, padding="same")(layers.UpSampling2D(2)(before))
    x = before = layers.add([x, shortcut])
outputs = layers.Conv2D(CLASSES, 3, activation="softmax", padding="same")(x)
model = keras.Model(inputs, outputs)

model.compile(optimizer=keras.optimizers.Adam(1e-3), loss="sparse_categorical_crossentropy")
path = os.path.join(tempfile.mkdtemp(), "segmentation.keras")
callbacks = [keras.callbacks.ModelCheckpoint(path, save_best_only=True)]
training, validation = Pets(images[:160], masks[:160]), Pets(images[160:], masks[160:])
history = model.fit(training, epochs=2, validation_data=validation, callbacks=callbacks, shuffle=False, verbose=0)
predicted = keras.models.load_model(path).predict(validation, verbose=0)
assert np.argmax(predicted, axis=-1).shape == (48, SIZE, SIZE)

print(history.history)
