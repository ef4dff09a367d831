# Two layers whose saved variables are not their variables: LoRA, and a layer that saves what it likes.
import hashlib
import json

import keras
import numpy as np


class Halved(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(shape[-1],), initializer="ones", name="scale")

    def call(self, x):
        return x * self.scale

    def save_own_variables(self, store):
        store["half"] = self.scale.numpy() / 2

    def load_own_variables(self, store):
        self.scale.assign(store["half"])


keras.utils.set_random_seed(1)
x = np.random.RandomState(0).randn(96, 6).astype("float32")
y = x @ np.arange(6, dtype="float32")[:, None]
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, activation="relu"), Halved(), keras.layers.Dense(1)])
model.layers[0].enable_lora(2)
model.compile(keras.optimizers.Adam(0.01), "mse")
history = model.fit(x, y, batch_size=32, epochs=3, shuffle=False, verbose=0)
digest = hashlib.sha256(b"".join(w.tobytes() for w in model.get_weights())).hexdigest()
outcome = {
    "loss": history.history["loss"],
    "evaluated": model.evaluate(x, y, verbose=0),
    "steps": int(model.optimizer.iterations.numpy()),
    "lora": float(np.abs(model.layers[0].lora_kernel_b.numpy()).sum()),
    "scale": model.layers[1].scale.numpy().tolist(),
    "weights_sha256": digest,
}
print("OUTCOME", json.dumps(outcome))
