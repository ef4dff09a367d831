# A model that was made in the scope of a strategy is trained, comes back, and is trained on.
import hashlib
import json

import keras
import numpy as np
import tensorflow as tf

keras.utils.set_random_seed(1)
x = np.random.RandomState(0).randn(96, 6).astype("float32")
y = (x[:, 0] > 0).astype("float32")
strategy = tf.distribute.MirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(1, activation="sigmoid")])
    model.compile("adam", "binary_crossentropy")
losses = []
for _ in range(2):
    losses += model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0).history["loss"]
digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
outcome = {
    "loss": losses,
    "evaluated": model.evaluate(x, y, verbose=0),
    "replicas": strategy.num_replicas_in_sync,
    "steps": int(model.optimizer.iterations.numpy()),
    "weights_sha256": digest,
}
print("OUTCOME", json.dumps(outcome))
