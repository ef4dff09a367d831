"""Stands for keras.io/examples/vision/mnist_convnet: a small convnet on arrays."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(1)

CLASSES = 4


def digits(records):
    """Images with a bright bar whose place tells the class."""
    labels = np.random.randint(0, CLASSES, records)
    images = np.random.randint(0, 128, (records, 10, 10)).astype("uint8")
    for image, label in zip(images, labels, strict=True):
        image[2 * label : 2 * label + 2] += 100
    return np.expand_dims(images.astype("float32") / 255, -1), keras.utils.to_categorical(labels, CLASSES)


x_train, y_train = digits(320)
x_test, y_test = digits(64)

model = keras.Sequential(
    [
        keras.Input(shape=(10, 10, 1)),
        layers.Conv2D(4, kernel_size=(3, 3), activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Conv2D(8, kernel_size=(3, 3), activation="relu"),
        layers.MaxPooling2D(pool_size=(2, 2)),
        layers.Flatten(),
        layers.Dropout(0.0),
        layers.Dense(CLASSES, activation="softmax"),
    ]
)
model.summary()
model.compile(loss="categorical_crossentropy", optimizer="adam", metrics=["accuracy"])
history = model.fit(x_train, y_train, batch_size=16, epochs=2, validation_split=0.1, shuffle=False, verbose=0)

loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
assert np.isfinite(loss)
assert 0 <= accuracy <= 1
print(history.history)
