"""Stands for keras.io/examples/structured_data/structured_data_classification_with_feature_space: FeatureSpace."""

import keras
import numpy as np
import tensorflow as tf
from keras.utils import FeatureSpace

keras.utils.set_random_seed(1)


def patients(records):
    features = {
        "age": np.random.randint(30, 80, records),
        "sex": np.random.randint(0, 2, records),
        "pain": np.random.randint(0, 4, records),
        "pressure": np.random.normal(130, 15, records),
        "depression": np.random.uniform(0, 4, records),
        "thal": np.random.choice(["fixed", "normal", "reversible"], records),
    }
    labels = (features["pressure"] / 130 + features["pain"] / 2 > 1.8).astype("int64")
    return tf.data.Dataset.from_tensor_slices((features, labels)).batch(16)


train_ds, val_ds = patients(240), patients(64)

feature_space = FeatureSpace(
    features={
        "sex": FeatureSpace.integer_categorical(num_oov_indices=0),
        "pain": FeatureSpace.integer_categorical(num_oov_indices=0),
        "thal": FeatureSpace.string_categorical(num_oov_indices=0),
        "age": FeatureSpace.float_discretized(num_bins=5),
        "pressure": FeatureSpace.float_normalized(),
        "depression": FeatureSpace.float_normalized(),
    },
    crosses=[
        FeatureSpace.cross(feature_names=("sex", "age"), crossing_dim=8),
        FeatureSpace.cross(feature_names=("thal", "pain"), crossing_dim=6),
    ],
    output_mode="concat",
)
feature_space.adapt(train_ds.map(lambda x, _: x))


def encoded(dataset):
    dataset = dataset.map(lambda x, y: (feature_space(x), y), num_parallel_calls=tf.data.AUTOTUNE)
    return dataset.prefetch(tf.data.AUTOTUNE)


dict_inputs = feature_space.get_inputs()
encoded_features = feature_space.get_encoded_features()
x = keras.layers.Dense(8, activation="relu")(encoded_features)
x = keras.layers.Dropout(0.0)(x)
predictions = keras.layers.Dense(1, activation="sigmoid")(x)

training_model = keras.Model(inputs=encoded_features, outputs=predictions)
training_model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
inference_model = keras.Model(inputs=dict_inputs, outputs=predictions)
history = training_model.fit(encoded(train_ds), epochs=2, validation_data=encoded(val_ds), verbose=0)

sample = {"age": 60, "sex": 1, "pain": 1, "pressure": 145.0, "depression": 2.3, "thal": "fixed"}
raw = {name: tf.convert_to_tensor([value]) for name, value in sample.items()}
inferred = inference_model.predict(raw, verbose=0)
space = feature_space({name: tf.convert_to_tensor([value]) for name, value in sample.items()})
np.testing.assert_allclose(inferred, training_model.predict(space, verbose=0), rtol=1e-5)
print(history.history)
