"""Stands for keras.io/examples/vision/image_classification_from_scratch: images in folders, a small Xception."""

import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(1)

SIZE = (12, 12)
folder = Path(tempfile.mkdtemp())
for kind, brightness in (("cat", 0), ("dog", 60)):
    (folder / "images" / kind).mkdir(parents=True)
    for n in range(150):
        image = np.random.randint(0, 190, (*SIZE, 3)) + brightness
        keras.utils.save_img(folder / "images" / kind / f"{n:03}.png", image, scale=False)

train_ds, val_ds = keras.utils.image_dataset_from_directory(
    folder / "images", validation_split=0.2, subset="both", shuffle=False, image_size=SIZE, batch_size=16, verbose=False
)
train_ds = train_ds.prefetch(tf.data.AUTOTUNE)
val_ds = val_ds.prefetch(tf.data.AUTOTUNE)


def make_model(input_shape):
    inputs = keras.Input(shape=input_shape)
    x = layers.Rescaling(1.0 / 255)(inputs)
    x = layers.Conv2D(4, 3, strides=2, padding="same")(x)
    x = layers.BatchNormalization()(x)
    x = layers.Activation("relu")(x)
    previous = x
    for size in (6, 8):
        x = layers.Activation("relu")(x)
        x = layers.SeparableConv2D(size, 3, padding="same")(x)
        x = layers.BatchNormalization()(x)
        x = layers.MaxPooling2D(3, strides=2, padding="same")(x)
        residual = layers.Conv2D(size, 1, strides=2, padding="same")(previous)
        x = layers.add([x, residual])
        previous = x
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(1, activation=None)(x))


model = make_model((*SIZE, 3))
model.compile(
    optimizer=keras.optimizers.Adam(3e-4),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy(name="acc")],
)
callbacks = [keras.callbacks.ModelCheckpoint(folder / "save_at_{epoch}.keras")]
history = model.fit(train_ds, epochs=2, callbacks=callbacks, validation_data=val_ds, verbose=0)

image = keras.utils.load_img(folder / "images" / "cat" / "007.png", target_size=SIZE)
array = keras.ops.expand_dims(keras.utils.img_to_array(image), 0)
score = float(keras.ops.sigmoid(model.predict(array, verbose=0)[0][0]))
assert 0 < score < 1
assert (folder / "save_at_2.keras").exists()
print(history.history)
