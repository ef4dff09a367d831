"""Stands for keras.io/guides/functional_api: three inputs, two outputs with loss weights, targets by name."""

import keras
import numpy as np
from keras import layers

keras.utils.set_random_seed(1)

WORDS, TAGS, DEPARTMENTS = 30, 5, 3

title_data = np.random.randint(WORDS, size=(240, 6))
body_data = np.random.randint(WORDS, size=(240, 12))
tags_data = np.random.randint(2, size=(240, TAGS)).astype("float32")
priority_targets = tags_data.mean(axis=1, keepdims=True)
department_targets = np.eye(DEPARTMENTS, dtype="float32")[title_data[:, 0] % DEPARTMENTS]

title = keras.Input((None,), name="title")
body = keras.Input((None,), name="body")
tags = keras.Input((TAGS,), name="tags")
title_features = layers.LSTM(6)(layers.Embedding(WORDS, 8)(title))
body_features = layers.LSTM(4)(layers.Embedding(WORDS, 8)(body))
features = layers.concatenate([title_features, body_features, tags])
priority = layers.Dense(1, name="priority")(features)
department = layers.Dense(DEPARTMENTS, name="department")(features)
model = keras.Model(inputs=[title, body, tags], outputs={"priority": priority, "department": department})

model.compile(
    optimizer=keras.optimizers.RMSprop(1e-3),
    loss={
        "priority": keras.losses.BinaryCrossentropy(from_logits=True),
        "department": keras.losses.CategoricalCrossentropy(from_logits=True),
    },
    loss_weights={"priority": 1.0, "department": 0.2},
    metrics={"department": ["accuracy"]},
)
data = {"title": title_data, "body": body_data, "tags": tags_data}
targets = {"priority": priority_targets, "department": department_targets}
history = model.fit(data, targets, epochs=2, batch_size=16, shuffle=False, verbose=0)
model.evaluate(data, targets, batch_size=32, verbose=0)
predicted = model.predict(data, batch_size=32, verbose=0)
assert predicted["department"].shape == (240, DEPARTMENTS)

extractor = keras.Model(model.inputs, [layer.output for layer in model.layers if isinstance(layer, layers.LSTM)])
assert [part.shape for part in extractor.predict(data, verbose=0)] == [(240, 6), (240, 4)]

print(history.history)
