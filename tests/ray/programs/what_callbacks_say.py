# Prints, warnings and exceptions of callbacks and layers arrive in the program as plain Keras leaves them there.
import contextlib
import io
import json
import sys
import warnings

import keras
import numpy as np


class Careful(UserWarning):
    pass


class Talking(keras.callbacks.Callback):
    def __init__(self, error=None):
        super().__init__()
        self.error = error

    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, end=";\n")
        print("to standard error", file=sys.stderr)
        warnings.warn(f"after epoch {epoch}", Careful, stacklevel=1)
        if self.error is not None:
            self.error.add_note("a note of the program's")
            raise self.error


@keras.saving.register_keras_serializable("programs")
class Raising(keras.layers.Layer):
    def call(self, x, training=False):
        if training:
            raise LookupError("in a layer")
        return x


def fit(*layers, error=None):
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    x = np.random.RandomState(0).rand(8, 2).astype("float32")
    return model.fit(x, x[:, :1], epochs=2, batch_size=4, shuffle=False, verbose=0, callbacks=[Talking(error)]).history


outcome, out, err = {}, io.StringIO(), io.StringIO()
with warnings.catch_warnings(record=True) as seen, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
    warnings.simplefilter("always")
    outcome |= fit()
outcome["printed"] = [out.getvalue(), err.getvalue().count("to standard error")]
outcome["warned"] = [str(one.message) for one in seen if one.category is Careful]
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        fit(error=TypeError("one", 2))
    except TypeError as error:
        outcome["raised"] = [type(error).__name__, list(error.args), error.__notes__[0]]
    try:
        fit(Raising())
    except LookupError as error:
        outcome["of a layer"] = ["in a layer" in str(error)]
print("OUTCOME", json.dumps(outcome))
