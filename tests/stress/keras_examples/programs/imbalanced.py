"""Stands for keras.io/examples/structured_data/imbalanced_classification: weights of classes, counts as metrics."""

import tempfile
from pathlib import Path

import keras
import numpy as np

keras.utils.set_random_seed(1)

features = np.random.normal(size=(400, 8)).astype("float32")
targets = (features[:, :1] + features[:, 1:2] > 1.8).astype("uint8")
train_features, val_features = features[:320], features[320:]
train_targets, val_targets = targets[:320], targets[320:]

counts = np.bincount(train_targets[:, 0])
class_weight = {0: 1.0 / counts[0], 1: 1.0 / counts[1]}

mean, std = np.mean(train_features, axis=0), np.std(train_features, axis=0)
train_features = (train_features - mean) / std
val_features = (val_features - mean) / std

model = keras.Sequential(
    [
        keras.Input(shape=train_features.shape[1:]),
        keras.layers.Dense(8, activation="relu"),
        keras.layers.Dense(8, activation="relu"),
        keras.layers.Dropout(0.0),
        keras.layers.Dense(8, activation="relu"),
        keras.layers.Dropout(0.0),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
metrics = [
    keras.metrics.FalseNegatives(name="fn"),
    keras.metrics.FalsePositives(name="fp"),
    keras.metrics.TrueNegatives(name="tn"),
    keras.metrics.TruePositives(name="tp"),
    keras.metrics.Precision(name="precision"),
    keras.metrics.Recall(name="recall"),
]
model.compile(optimizer=keras.optimizers.Adam(1e-2), loss="binary_crossentropy", metrics=metrics)

folder = Path(tempfile.mkdtemp())
history = model.fit(
    train_features,
    train_targets,
    batch_size=32,
    epochs=2,
    verbose=0,
    callbacks=[keras.callbacks.ModelCheckpoint(str(folder / "model_at_epoch_{epoch}.keras"))],
    validation_data=(val_features, val_targets),
    class_weight=class_weight,
    shuffle=False,
)
assert sum(history.history[f"val_{name}"][-1] for name in ("fn", "fp", "tn", "tp")) == len(val_targets)
assert (folder / "model_at_epoch_2.keras").exists()
print(history.history)
