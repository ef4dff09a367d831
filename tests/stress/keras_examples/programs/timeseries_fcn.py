"""Stands for keras.io/examples/timeseries/timeseries_classification_from_scratch: Conv1D, three callbacks."""

import tempfile
from pathlib import Path

import keras
import numpy as np

keras.utils.set_random_seed(1)

LENGTH, CLASSES = 12, 2


def series(records):
    """Noise, or noise on a wave; records one after another, then in another order."""
    labels = np.arange(records) % CLASSES
    x = np.random.normal(size=(records, LENGTH)) + labels[:, None] * np.sin(np.arange(LENGTH))
    order = np.random.permutation(records)
    return x[order].reshape((records, LENGTH, 1)), labels[order]


x_train, y_train = series(320)
x_test, y_test = series(64)


def make_model(input_shape):
    inputs = keras.layers.Input(input_shape)
    x = inputs
    for _ in range(3):
        x = keras.layers.Conv1D(filters=6, kernel_size=3, padding="same")(x)
        x = keras.layers.BatchNormalization()(x)
        x = keras.layers.ReLU()(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.models.Model(inputs=inputs, outputs=keras.layers.Dense(CLASSES, activation="softmax")(x))


model = make_model(input_shape=x_train.shape[1:])
best = str(Path(tempfile.mkdtemp()) / "best_model.keras")
callbacks = [
    keras.callbacks.ModelCheckpoint(best, save_best_only=True, monitor="val_loss"),
    keras.callbacks.ReduceLROnPlateau(monitor="val_loss", factor=0.5, patience=20, min_lr=0.0001),
    keras.callbacks.EarlyStopping(monitor="val_loss", patience=50, verbose=0),
]
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["sparse_categorical_accuracy"])
history = model.fit(
    x_train, y_train, batch_size=16, epochs=2, callbacks=callbacks, validation_split=0.2, shuffle=False, verbose=0
)

model = keras.models.load_model(best)
test_loss, test_accuracy = model.evaluate(x_test, y_test, verbose=0)
assert np.isfinite(test_loss)
assert len(history.history["val_sparse_categorical_accuracy"]) == 2
print(history.history)
