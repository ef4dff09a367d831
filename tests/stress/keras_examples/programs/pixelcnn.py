"""Stands for keras.io/examples/generative/pixelcnn: convolutions that mask their kernel when they are called."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(1)

SIZE = 8

images = np.random.randint(0, 100, (240, SIZE, SIZE, 1))
for image, row in zip(images, np.random.randint(0, 6, 240), strict=True):
    image[row : row + 2] += 100
images = np.where(images < 0.33 * 256, 0, 1).astype("float32")


class MaskedConv(layers.Layer):
    def __init__(self, kind, **kwargs):
        super().__init__()
        self.kind, self.conv = kind, layers.Conv2D(**kwargs)

    def build(self, input_shape):
        self.conv.build(input_shape)
        self.mask = np.zeros(self.conv.kernel.shape, "float32")
        height, width = self.mask.shape[0] // 2, self.mask.shape[1] // 2
        self.mask[:height] = 1.0
        self.mask[height, : width + (self.kind == "B")] = 1.0

    def call(self, inputs):
        kernel = self.conv.kernel
        kernel.assign(kernel * self.mask)
        return self.conv(inputs)


class ResidualBlock(layers.Layer):
    def __init__(self, filters, **kwargs):
        super().__init__(**kwargs)
        self.steps = [
            layers.ReLU(),
            layers.Conv2D(filters, 1, activation="relu"),
            MaskedConv("B", filters=filters // 2, kernel_size=3, padding="same", activation="relu"),
            layers.Conv2D(filters, 1, activation="relu"),
        ]

    def call(self, inputs):
        x = inputs
        for step in self.steps:
            x = step(x)
        return layers.add([inputs, x])


inputs = keras.Input(shape=(SIZE, SIZE, 1))
x = MaskedConv("A", filters=8, kernel_size=5, padding="same", activation="relu")(inputs)
for _ in range(2):
    x = ResidualBlock(filters=8)(x)
for _ in range(2):
    x = MaskedConv("B", filters=8, kernel_size=1, strides=1, padding="valid", activation="relu")(x)
pixel_cnn = keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x))
pixel_cnn.compile(optimizer=keras.optimizers.Adam(learning_rate=0.0005), loss="binary_crossentropy")
pixel_cnn.summary()
history = pixel_cnn.fit(x=images, y=images, batch_size=16, epochs=2, validation_split=0.1, shuffle=False, verbose=0)

pixels = np.zeros((4, *pixel_cnn.input_shape[1:]))
for row, column in np.ndindex(2, SIZE):
    chances = pixel_cnn.predict(pixels, verbose=0)[:, row, column]
    pixels[:, row, column] = np.ceil(chances - np.random.uniform(size=chances.shape))
assert set(np.unique(pixels)) <= {0.0, 1.0}
print(history.history)
