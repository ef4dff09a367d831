"""Stands for keras.io/examples/structured_data/wide_deep_cross_networks: a CSV file, dicts of numbers and strings."""

import tempfile
from pathlib import Path

import keras
import numpy as np
import tensorflow as tf
from keras import layers

keras.utils.set_random_seed(1)

NUMBERS, CLASSES, HIDDEN = ["elevation", "slope", "shade"], 3, [8, 8]
WORDS = {"area": ["north", "south", "east", "west"], "soil": [f"soil_{n}" for n in range(9)]}
HEADER = [*NUMBERS, *WORDS, "cover"]
DEFAULTS = [["NA"] if name in WORDS else [0] for name in HEADER]


def csv(path, records):
    columns = [np.random.randint(0, 10, records) for _ in NUMBERS]
    columns += [np.random.choice(words, records) for words in WORDS.values()]
    rows = [HEADER, *zip(*columns, (columns[0] + columns[1]) % CLASSES, strict=True)]
    path.write_text("".join(",".join(map(str, row)) + "\n" for row in rows))
    dataset = tf.data.experimental.make_csv_dataset(
        str(path), 16, HEADER, DEFAULTS, label_name="cover", num_epochs=1, header=True, shuffle=False
    )
    return dataset.map(lambda features, target: (dict(features), target)).cache()


folder = Path(tempfile.mkdtemp())
train_dataset, test_dataset = csv(folder / "train.csv", 240), csv(folder / "test.csv", 48)
inputs = {name: layers.Input(name=name, shape=(), dtype="float32") for name in NUMBERS}
inputs |= {name: layers.Input(name=name, shape=(), dtype="string") for name in WORDS}


def encode(inputs, mode):
    encoded = [keras.ops.expand_dims(inputs[name], -1) for name in NUMBERS]
    for name, words in WORDS.items():
        lookup = layers.StringLookup(vocabulary=words, mask_token=None, num_oov_indices=0, output_mode=mode)
        one_hot = mode == "multi_hot"
        x = lookup(keras.ops.expand_dims(inputs[name], -1) if one_hot else inputs[name])
        encoded.append(x if one_hot else layers.Embedding(len(words), 2)(x))
    return layers.concatenate(encoded)


def create_model(inputs, part, deep):
    for units in HIDDEN:
        deep = layers.ReLU()(layers.BatchNormalization()(layers.Dense(units)(deep)))
    merged = layers.concatenate([layers.BatchNormalization()(part), deep])
    return keras.Model(inputs, layers.Dense(CLASSES, activation="softmax")(merged))


def run_experiment(model):
    metrics = [keras.metrics.SparseCategoricalAccuracy()]
    model.compile(keras.optimizers.Adam(0.001), keras.losses.SparseCategoricalCrossentropy(), metrics=metrics)
    history = model.fit(train_dataset, epochs=2, verbose=0)
    model.evaluate(test_dataset, verbose=0)
    return history


wide_and_deep = create_model(inputs, encode(inputs, "multi_hot"), encode(inputs, "int"))

x0 = cross = encode(inputs, "int")
for _ in HIDDEN:
    cross = x0 * layers.Dense(cross.shape[-1])(cross) + cross
deep_and_cross = create_model(inputs, cross, x0)

print(run_experiment(wide_and_deep).history, run_experiment(deep_and_cross).history)
