"""Stands for keras.io/examples/vision/autoencoder: a convolutional autoencoder, fit again to take noise away."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(1)


def bars(records):
    images = np.random.uniform(0, 0.2, (records, 12, 12, 1)).astype("float32")
    for image, row in zip(images, np.random.randint(0, 10, records), strict=True):
        image[row : row + 2] += 0.8
    return images


def noisy(images):
    noise = np.random.normal(loc=0.0, scale=1.0, size=images.shape)
    return np.clip(images + 0.4 * noise, 0.0, 1.0).astype("float32")


train_data, test_data = bars(240), bars(64)
noisy_train_data, noisy_test_data = noisy(train_data), noisy(test_data)

inputs = layers.Input(shape=(12, 12, 1))
x = layers.Conv2D(6, (3, 3), activation="relu", padding="same")(inputs)
x = layers.MaxPooling2D((2, 2), padding="same")(x)
x = layers.Conv2D(6, (3, 3), activation="relu", padding="same")(x)
x = layers.MaxPooling2D((2, 2), padding="same")(x)
x = layers.Conv2DTranspose(6, (3, 3), strides=2, activation="relu", padding="same")(x)
x = layers.Conv2DTranspose(6, (3, 3), strides=2, activation="relu", padding="same")(x)
x = layers.Conv2D(1, (3, 3), activation="sigmoid", padding="same")(x)
autoencoder = keras.Model(inputs, x)
autoencoder.compile(optimizer="adam", loss="binary_crossentropy")
autoencoder.summary()

plain = autoencoder.fit(
    x=train_data,
    y=train_data,
    epochs=2,
    batch_size=16,
    shuffle=False,
    validation_data=(test_data, test_data),
    verbose=0,
)
assert autoencoder.predict(test_data, verbose=0).shape == test_data.shape

denoising = autoencoder.fit(
    x=noisy_train_data,
    y=train_data,
    epochs=2,
    batch_size=16,
    shuffle=False,
    validation_data=(noisy_test_data, test_data),
    verbose=0,
)
assert np.isfinite(autoencoder.predict(noisy_test_data, verbose=0)).all()
print(plain.history, denoising.history)
