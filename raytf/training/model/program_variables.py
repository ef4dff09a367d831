"""Variables of the program that the training step reads, and that belong to neither the model nor its optimizer.

Examples are the weight of a loss that a callback anneals, or a temperature. They are found in the graph of the traced
step, which captures them whatever object of the program holds them. They are part of a run's state: all ranks receive
the values that callbacks assign, checkpoints hold them, and after the run the program's own variables get them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raytf._tensorflow import WRITES, ops_of
from raytf.checkpoint import codec, variables
from raytf.errors import ModelError
from raytf.storage.storage import Storage
from raytf.training.user.user_code import Parcel

#: In the run's folder: the last values of the variables, by their keys.
STATE_FILE = "program.safetensors"


class ProgramVariable:
    """A variable of the program, with the interface of a `keras.Variable` that a run's state needs.

    Args:
        value: TensorFlow's variable.

    Attributes:
        shape, dtype: as in a `keras.Variable`.
        name, path: a name that does not depend on the process.
    """

    def __init__(self, value: tf.Variable):
        self.value = value
        self.shape, self.dtype = tuple(value.shape), value.dtype.name
        self.name = self.path = value.name.partition(":")[0].rpartition("/")[2]

    def numpy(self) -> np.ndarray:
        return np.asarray(self.value.numpy())

    def assign(self, value: Any) -> None:
        self.value.assign(value)


def find(traced: Any, known: Iterable[keras.Variable]) -> list[ProgramVariable]:
    """Return the variables that a traced function reads, except known ones, in the order in which it captured them.

    Args:
        traced: a concrete function.
        known: the variables of the model and its optimizer.

    Raises:
        ModelError: the function writes a variable of the program.
    """
    others = {id(variable.value) for variable in known}
    by_handle = {id(variable.handle): variable for variable in traced.graph.variables}
    captured = [by_handle[id(handle)] for handle in traced.captured_inputs if id(handle) in by_handle]
    own = [ProgramVariable(variable) for variable in captured if id(variable) not in others]
    if own and any(WRITES.match(op.kind) for op in ops_of(traced)):
        raise ModelError(_WRITTEN.format(f"a tf.Variable ({', '.join(each.name for each in own)})"))
    return own


def check_unchanged(changed: Iterable[keras.Variable], known: Iterable[keras.Variable]) -> None:
    """Refuse a step that changes a variable of the program.

    Args:
        changed: the variables that a shard of the step has changed.
        known: the variables of the model, its metrics and its random generators.

    Raises:
        ModelError: a changed variable is not a known one.
    """
    own = {id(variable) for variable in known}
    for variable in changed:
        if id(variable) not in own and not variable.path.endswith("seed_generator_state"):
            raise ModelError(_WRITTEN.format(f"the variable {variable.path}"))


_WRITTEN = (
    "a layer, loss or metric changes {}, which is not the model's, so the shards of a step cannot agree on its value. "
    "Make it a weight of the layer or metric (self.add_weight(..., trainable=False)), or change it in a callback."
)


def keep(run: Storage, model: keras.Model, code: Parcel[Any]) -> None:
    """Write the values that the program's variables have at the end of a run, for `give_back`."""
    keys = {id(_inner(variable)): key for key, variable in _program_s(code).items()}
    values = {keys.get(id(each.value)): each.numpy() for each in variables.program_of(model)}
    values.pop(None, None)  # a variable that the model function made, which the program does not hold
    if values:
        run.put(STATE_FILE, codec.encode({str(key): value for key, value in values.items()}))


def give_back(run: Storage, code: Parcel[Any]) -> None:
    """Give the program's variables the values that they had at the end of a run.

    Args:
        run: the run's folder.
        code: the program's part of the run.
    """
    data = run.get_or_none(STATE_FILE)
    if data is None:
        return
    own = _program_s(code)
    for key, value in codec.decode(data).items():
        if key in own:
            own[key].assign(value)


def _program_s(code: Parcel[Any]) -> dict[str, Any]:
    """Return the variables that the program holds, by keys that are the same in each process of a run."""
    by_key = {str(place): variable for place, variable in enumerate(code.variables())}
    for name, module in list(sys.modules.items()):
        if name == "__main__" or not hasattr(module, "__file__") or name.partition(".")[0] in _LIBRARIES:
            continue
        for attribute, value in list(vars(module).items()):
            if isinstance(value, (keras.Variable, tf.Variable)):
                by_key.setdefault(f"{name}:{attribute}", value)
    return by_key


#: Packages whose variables do not belong to the program.
_LIBRARIES = ("keras", "ray", "raytf", "tensorflow")


def _inner(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable
