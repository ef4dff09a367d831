# shards: any
"""Two calls of `fit` with a LossScaleOptimizer, on a model that the first one builds."""

import json

import keras
import numpy as np

keras.utils.set_random_seed(2)
x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
y = np.random.default_rng(1).normal(size=(16, 2)).astype("float32")
optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.9))
model = keras.Sequential([keras.layers.Dense(2, kernel_initializer="ones")])
model.compile(optimizer, "mse", metrics=["mse"])
first = model.fit(x, y, batch_size=16, epochs=2, verbose=0, callbacks=[keras.callbacks.SwapEMAWeights()]).history
names = [variable.path for variable in model.optimizer.variables]
second = model.fit(x, y, batch_size=16, epochs=2, verbose=0).history
steps = int(model.optimizer.inner_optimizer.iterations)
is_same = names == [variable.path for variable in model.optimizer.variables]
print("OUTCOME", json.dumps({"first": first, "second": second, "steps": steps, "is_same": is_same}))
