"""Stands for keras.io/examples/timeseries/timeseries_weather_forecasting: windows of a series, an LSTM."""

import tempfile
from pathlib import Path

import keras
import numpy as np

keras.utils.set_random_seed(1)

ROWS, SPLIT, PAST, FUTURE, STEP = 360, 250, 12, 4, 2
hours = np.arange(ROWS)[:, None]
weather = np.sin(hours / np.array([5.0, 7.0, 11.0])) * 10 + 15 + np.random.normal(size=(ROWS, 3))
weather = (weather - weather[:SPLIT].mean(axis=0)) / weather[:SPLIT].std(axis=0)

start = PAST + FUTURE
dataset_train = keras.preprocessing.timeseries_dataset_from_array(
    weather[:SPLIT],
    weather[start : start + SPLIT, [1]],
    sequence_length=PAST // STEP,
    sampling_rate=STEP,
    batch_size=16,
)
dataset_val = keras.preprocessing.timeseries_dataset_from_array(
    weather[SPLIT:-start],
    weather[SPLIT + start :, [1]],
    sequence_length=PAST // STEP,
    sampling_rate=STEP,
    batch_size=16,
)
for batch in dataset_train.take(1):
    inputs, targets = batch

layer = keras.layers.Input(shape=(inputs.shape[1], inputs.shape[2]))
lstm_out = keras.layers.LSTM(8)(layer)
outputs = keras.layers.Dense(1)(lstm_out)
model = keras.Model(inputs=layer, outputs=outputs)
model.compile(optimizer=keras.optimizers.Adam(learning_rate=0.001), loss="mse")

path = str(Path(tempfile.mkdtemp()) / "model_checkpoint.weights.h5")
stop = keras.callbacks.EarlyStopping(monitor="val_loss", min_delta=0, patience=5)
checkpoint = keras.callbacks.ModelCheckpoint(
    monitor="val_loss", filepath=path, verbose=0, save_weights_only=True, save_best_only=True
)
history = model.fit(dataset_train, epochs=2, validation_data=dataset_val, callbacks=[stop, checkpoint], verbose=0)

for x, y in dataset_val.take(5):
    assert model.predict(x, verbose=0).shape == y.shape
assert Path(path).exists()
print(history.history)
