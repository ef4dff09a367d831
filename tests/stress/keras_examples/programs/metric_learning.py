"""Stands for keras.io/examples/vision/metric_learning: batches of shape (2, classes, ...), a loss over their pairs."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(1)

CLASSES, SIDE, BATCHES = 10, 12, 12

colors = np.random.uniform(0, 1, (CLASSES, 1, 1, 3))
images = np.clip(colors[:, None] + np.random.normal(0, 0.1, (CLASSES, 20, SIDE, SIDE, 3)), 0, 1).astype("float32")


class AnchorPositivePairs(keras.utils.PyDataset):
    """A pair of images of each class; each batch always has the same ones."""

    def __init__(self, batches):
        super().__init__()
        self.batches = batches

    def __len__(self):
        return self.batches

    def __getitem__(self, index):
        draw = np.random.RandomState(index)
        x = np.empty((2, CLASSES, SIDE, SIDE, 3), dtype=np.float32)
        for place in range(CLASSES):
            anchor, positive = draw.choice(20, 2, replace=False)
            x[0, place], x[1, place] = images[place, anchor], images[place, positive]
        return x


class EmbeddingModel(keras.Model):
    def train_step(self, data):
        if isinstance(data, tuple):
            data = data[0]
        anchors, positives = data[0], data[1]
        with tf.GradientTape() as tape:
            anchor_embeddings = self(anchors, training=True)
            positive_embeddings = self(positives, training=True)
            similarities = keras.ops.einsum("ae,pe->ap", anchor_embeddings, positive_embeddings)
            similarities /= 0.2
            sparse_labels = keras.ops.arange(CLASSES)
            loss = self.compute_loss(y=sparse_labels, y_pred=similarities)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        for metric in self.metrics:
            if metric.name == "loss":
                metric.update_state(loss)
            else:
                metric.update_state(sparse_labels, similarities)
        return {metric.name: metric.result() for metric in self.metrics}


inputs = keras.Input((SIDE, SIDE, 3))
x = layers.Conv2D(8, 3, strides=2, activation="relu")(inputs)
x = layers.Conv2D(16, 3, strides=2, activation="relu")(x)
x = layers.GlobalAveragePooling2D()(x)
embeddings = layers.UnitNormalization()(layers.Dense(8)(x))

model = EmbeddingModel(inputs, embeddings)
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=1e-2),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
)
history = model.fit(AnchorPositivePairs(BATCHES), epochs=2, shuffle=False, verbose=0)
print(history.history)
