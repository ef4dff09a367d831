"""Stands for keras.io/examples/vision/supervised-contrastive-learning: a loss of batches, then a frozen encoder."""

import keras
import numpy as np
from keras import layers, ops

keras.utils.set_random_seed(1)

CLASSES, SHAPE = 4, (8, 8, 3)

labels = np.random.randint(0, CLASSES, (304, 1))
images = np.random.uniform(0, 80, (304, *SHAPE)).astype("float32")
for image, (label,) in zip(images, labels, strict=True):
    image[2 * label : 2 * label + 2] += 120
x_train, y_train, x_test, y_test = images[:240], labels[:240], images[240:], labels[240:]

# Without the page's random flips and rotations, so that nothing is drawn.
preparation = keras.Sequential([layers.Normalization()])
preparation.layers[0].adapt(x_train)


def make_encoder():
    inputs = keras.Input(shape=SHAPE)
    x = layers.Conv2D(6, 3, padding="same", use_bias=False)(preparation(inputs))
    x = layers.Activation("relu")(layers.BatchNormalization()(x))
    x = layers.add([x, layers.Conv2D(6, 3, padding="same", activation="relu")(x)])
    return keras.Model(inputs, layers.GlobalAveragePooling2D()(x), name="encoder")


def make_classifier(encoder, trainable=True):
    for layer in encoder.layers:
        layer.trainable = trainable
    inputs = keras.Input(shape=SHAPE)
    features = layers.Dropout(0.0)(encoder(inputs))
    features = layers.Dropout(0.0)(layers.Dense(12, activation="relu")(features))
    model = keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(features), name="classifier")
    loss, metric = keras.losses.SparseCategoricalCrossentropy(), keras.metrics.SparseCategoricalAccuracy()
    model.compile(optimizer=keras.optimizers.Adam(0.001), loss=loss, metrics=[metric])
    return model


class SupervisedContrastiveLoss(keras.losses.Loss):
    def __init__(self, temperature=1, name=None):
        super().__init__(name=name)
        self.temperature = temperature

    def __call__(self, labels, features, sample_weight=None):
        features = ops.normalize(features, axis=1)
        logits = ops.matmul(features, ops.transpose(features)) / self.temperature
        same = ops.cast(ops.equal(labels, ops.transpose(labels)), logits.dtype)
        same /= ops.sum(same, axis=1, keepdims=True)
        return ops.mean(ops.categorical_crossentropy(same, logits, from_logits=True))


fitting = {"batch_size": 16, "epochs": 2, "shuffle": False, "verbose": 0}
classifier = make_classifier(make_encoder())
baseline = classifier.fit(x=x_train, y=y_train, **fitting)
classifier.evaluate(x_test, y_test, verbose=0)

encoder = make_encoder()
inputs = keras.Input(shape=SHAPE)
with_head = keras.Model(inputs, layers.Dense(8, activation="relu")(encoder(inputs)), name="with_head")
with_head.compile(optimizer=keras.optimizers.Adam(0.001), loss=SupervisedContrastiveLoss(0.05))
pretraining = with_head.fit(x=x_train, y=y_train, **fitting)

classifier = make_classifier(encoder, trainable=False)
frozen = classifier.fit(x=x_train, y=y_train, **fitting)
assert len(classifier.evaluate(x_test, y_test, verbose=0)) == 2
for history in (baseline, pretraining, frozen):
    print(history.history)
