"""Stands for keras.io/examples/vision/conv_lstm: a stack of ConvLSTM2D layers that predicts the next frame."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(1)

FRAMES, SIZE = 7, 8

movies = np.zeros((200, FRAMES, SIZE, SIZE, 1), dtype="float32")
starts, directions = np.random.randint(0, SIZE, size=(200, 2)), np.random.randint(-1, 2, size=(200, 2))
for movie, start, direction in zip(movies, starts, directions, strict=True):
    for time in range(FRAMES):
        row, column = (start + time * direction) % SIZE
        movie[time, row : row + 2, column : column + 2] = 1.0


def shifted(data):
    return data[:, :-1], data[:, 1:]


x_train, y_train = shifted(movies[:160])
x_validation, y_validation = shifted(movies[160:])

inputs = keras.Input((None, *x_train.shape[2:]))
x = inputs
for size in (5, 3, 1):
    x = layers.ConvLSTM2D(filters=4, kernel_size=size, padding="same", return_sequences=True, activation="relu")(x)
    if size > 1:
        x = layers.BatchNormalization()(x)
outputs = layers.Conv3D(filters=1, kernel_size=(3, 3, 3), activation="sigmoid", padding="same")(x)
model = keras.Model(inputs, outputs)
model.compile(loss=keras.losses.binary_crossentropy, optimizer=keras.optimizers.Adam())

history = model.fit(
    x_train,
    y_train,
    batch_size=16,
    epochs=2,
    validation_data=(x_validation, y_validation),
    callbacks=[
        keras.callbacks.EarlyStopping(monitor="val_loss", patience=10),
        keras.callbacks.ReduceLROnPlateau(monitor="val_loss", patience=5),
    ],
    shuffle=False,
    verbose=0,
)

frames = movies[-1, :4]
for _ in range(2):
    following = model.predict(frames[None], verbose=0)[0, -1:]
    frames = np.concatenate([frames, following])
assert frames.shape == (6, SIZE, SIZE, 1)

print(history.history)
