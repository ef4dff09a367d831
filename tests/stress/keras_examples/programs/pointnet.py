"""Stands for keras.io/examples/vision/pointnet: transform nets with an orthogonal regularizer, batch normalization."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

keras.utils.set_random_seed(1)

POINTS, CLASSES = 12, 3

labels = np.random.randint(CLASSES, size=240)
clouds = np.random.normal(size=(240, POINTS, 3)) * (1 + np.eye(3)[labels][:, None, :])


def centre(points, label):
    return points - tf.reduce_mean(points, axis=0, keepdims=True), label


def dataset(start, end):
    return tf.data.Dataset.from_tensor_slices((clouds[start:end], labels[start:end])).map(centre).batch(16)


class Orthogonal(keras.regularizers.Regularizer):
    def __init__(self, features, factor=0.001):
        self.features, self.factor = features, factor

    def __call__(self, x):
        x = ops.reshape(x, (-1, self.features, self.features))
        products = ops.matmul(x, ops.transpose(x, (0, 2, 1)))
        return ops.sum(self.factor * ops.square(products - ops.eye(self.features)))

    def get_config(self):
        return {"features": self.features, "factor": self.factor}


def conv(x, filters):
    x = layers.Conv1D(filters, kernel_size=1, padding="valid")(x)
    return layers.Activation("relu")(layers.BatchNormalization(momentum=0.0)(x))


def dense(x, units):
    return layers.Activation("relu")(layers.BatchNormalization(momentum=0.0)(layers.Dense(units)(x)))


def transform(inputs, features):
    x = layers.GlobalMaxPooling1D()(conv(conv(inputs, 4), 8))
    matrix = layers.Dense(
        features * features,
        kernel_initializer="zeros",
        bias_initializer=keras.initializers.Constant(np.eye(features).flatten()),
        activity_regularizer=Orthogonal(features),
    )(dense(x, 8))
    return layers.Dot(axes=(2, 1))([inputs, layers.Reshape((features, features))(matrix)])


inputs = keras.Input((POINTS, 3))
x = conv(transform(inputs, 3), 6)
x = conv(transform(x, 6), 8)
x = dense(layers.GlobalMaxPooling1D()(x), 8)
model = keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(x), name="pointnet")
model.compile(
    loss="sparse_categorical_crossentropy",
    optimizer=keras.optimizers.Adam(learning_rate=0.001),
    metrics=["sparse_categorical_accuracy"],
)
history = model.fit(dataset(0, 192), epochs=2, validation_data=dataset(192, 240), verbose=0)
for points, _ in dataset(192, 240).take(1):
    assert model.predict(points[:8], verbose=0).argmax(-1).shape == (8,)
print(history.history)
