"""What callbacks keep in themselves, and in objects that they share with each other and with the program."""

import collections
import dataclasses
import json

import keras
import numpy as np

keras.utils.set_random_seed(3)
rng = np.random.default_rng(0)
x = rng.normal(size=(96, 6)).astype("float32")
y = (x @ rng.normal(size=(6, 1))).astype("float32")
model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01), "mse")


@dataclasses.dataclass
class Row:
    epoch: int
    loss: float


class Journal:
    def __init__(self):
        self.rows = []

    def write(self, row):
        self.rows.append(row)


class Best(keras.callbacks.Callback):
    def __init__(self, journal, best=None):
        super().__init__()
        self.journal, self.best = journal, best
        self.norms = {}
        self.last = collections.deque(maxlen=2)

    def on_epoch_end(self, epoch, logs=None):
        self.best = self.model.get_weights()[0]
        self.norms[epoch] = {"norm": np.linalg.norm(self.best)}
        self.last.append(logs["loss"])
        self.journal.write(Row(epoch, logs["loss"]))


class Marks(keras.callbacks.Callback):
    def __init__(self, journal):
        super().__init__()
        self.journal = journal

    def on_epoch_begin(self, epoch, logs=None):
        self.journal.write(Row(epoch, 0.0))


calls, table, journal = 0, {}, Journal()


def count(batch, logs):
    global calls
    calls += 1
    table.setdefault(batch, []).append(logs["loss"])


best = Best(journal)
stopper = keras.callbacks.EarlyStopping("loss", min_delta=0.001, patience=2)
hooks = [best, Marks(journal), stopper, keras.callbacks.LambdaCallback(on_train_batch_end=count)]
history = model.fit(x, y, batch_size=32, epochs=3, shuffle=False, verbose=0, callbacks=hooks)
outcome = {
    "calls": calls,
    "table": [[batch, losses] for batch, losses in table.items()],
    "journal": [[row.epoch, row.loss, type(row).__name__] for row in journal.rows],
    "best": best.best.tolist(),
    "norms": [[epoch, float(each["norm"])] for epoch, each in best.norms.items()],
    "last": [list(best.last), best.last.maxlen],
    "stopper": [stopper.wait, stopper.best, stopper.min_delta, stopper.monitor_op is keras.ops.less],
    "same model": [best.model is model, model.history.history == history.history],
    "params": history.params,
    "callback params": best.params,
}
print("OUTCOME", json.dumps(outcome))
