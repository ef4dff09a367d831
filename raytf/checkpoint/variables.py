"""The tensors of a checkpoint: every variable of model, optimizer and metrics, by name."""

from __future__ import annotations

import contextlib
import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from raytf import _keras
from raytf._process import in_thread
from raytf.checkpoint.codec import DeviceTensor, Tensor, copy_all
from raytf.errors import CheckpointError


def variables(model: keras.Model) -> dict[str, keras.Variable]:
    """Return name -> variable, in one order for a given model."""
    own, metrics = own_of(model), model.metrics_variables
    program = {f"{PROGRAM_PREFIX}{i:05d}/{v.name}": v for i, v in enumerate(program_of(model))}
    return _named(model, model.optimizer.variables, own, metrics) | program


def weights(model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None) -> dict[str, keras.Variable]:
    """Return what `variables` returns but metrics, for a model that is not compiled; the optimizer's only if given."""
    if optimizer is None:
        return _named(model, [], [], [])
    return _named(model, optimizer.variables, own_of(model), [])


@contextlib.contextmanager
def unchanged(changing: Sequence[keras.Variable]) -> Iterator[list[tf.Variable]]:
    """Yield TensorFlow's own variables of Keras's, and restore their values at the end; until then they exist twice."""
    inner = [variable.value for variable in changing]
    before = [tf.identity(each) for each in inner]
    try:
        yield inner
    finally:
        for variable, value in zip(inner, before, strict=True):
            variable.assign(value)


#: Other variables of a model with a custom `train_step`: an attribute of the model, see `keep`.
_OWN = "_raytf_own"


def keep(model: keras.Model, own: Sequence[keras.Variable]) -> None:
    """Have variables be of a model's state that are neither weights nor of its optimizer or the metrics it names."""
    vars(model)[_OWN] = list(own)


def own_of(model: keras.Model) -> list[keras.Variable]:
    """Return the variables that `keep` was called with; none for other models."""
    return vars(model).get(_OWN, [])


#: The variables of the program that the training step reads, as a model's attribute: see `keep_program`.
_PROGRAM = "_raytf_program"
#: The prefix of their names in a state.
PROGRAM_PREFIX = "program/"


def keep_program(model: keras.Model, variables: Sequence[Any]) -> None:
    """Have variables of the program be part of the state: see `raytf.training.model.program_variables`."""
    vars(model)[_PROGRAM] = list(variables)


def program_of(model: keras.Model) -> list[Any]:
    """Return the variables that `keep_program` was called with; none for other models."""
    return vars(model).get(_PROGRAM, [])


def _named(model: keras.Model, optimizer: list[Any], own: list[Any], metrics: list[Any]) -> dict[str, keras.Variable]:
    seeds = {id(v) for v in seed_states(model)}
    named: dict[str, keras.Variable] = {}
    for part, candidates in (
        ("model", [v for v in model.variables if id(v) not in seeds]),
        ("optimizer", optimizer),
        ("own", own),
        ("metrics", metrics),
    ):
        taken = {id(v) for v in named.values()}
        new = [v for v in candidates if id(v) not in taken]
        # Not the path: it holds layer names that count up with every model made in a process.
        named.update({f"{part}/{i:05d}/{v.name}": v for i, v in enumerate(new)})
    return named


def sizes(named: Mapping[str, keras.Variable]) -> dict[str, int]:
    """Return how many values each variable has."""
    return {name: int(np.prod(v.shape, dtype=np.int64)) for name, v in named.items()}


def size_of(named: Mapping[str, keras.Variable]) -> int:
    """Return the bytes of all variables."""
    return sum(_bytes(v.value) for v in named.values())


def is_on_host(named: Mapping[str, keras.Variable]) -> bool:
    """Return whether the values are in the host's memory."""
    return all(_is_on_cpu(v.value) for v in named.values())


@dataclass(frozen=True)
class TensorValues:
    """The values of some tensors as they are now.

    Attributes:
        tensors: by name.
        is_held: later steps do not change them; else they have to be taken before the next step begins.
        is_here: all are in the host's memory.
    """

    tensors: Mapping[str, Tensor]
    is_held: bool
    is_here: bool


class TensorSource(Protocol):
    """The source of the values of a state's tensors, which have `nbytes` in all."""

    @property
    def nbytes(self) -> int: ...

    def now(self) -> TensorValues: ...


#: A source of the tensors with some names.
MakeSource = Callable[[Sequence[str]], TensorSource]


class Variables:
    """The values of variables.

    On a CPU they are the variables' own buffers. On another device they stay there until they are fetched, one by one:
    beside training where the device has memory for them twice, for an update of a variable whose values somebody
    holds goes to new memory (TensorFlow's copy on write); else the next step has to wait.

    Args:
        named: variables.
        names: of those that are asked for.
        may_hold: whether a device has memory for values of this many bytes beside those of the variables.
        is_here: whether a tensor or a variable is in the host's memory; injected by tests, which have no GPU.
    """

    def __init__(
        self,
        named: Mapping[str, keras.Variable],
        names: Sequence[str],
        may_hold: Callable[[int], bool] = lambda size: True,
        is_here: Callable[[Any], bool] | None = None,
    ):
        self._may_hold = may_hold
        is_here = is_here or _is_on_cpu
        self._variables = {name: named[name].value for name in names}
        self._far = {name for name, variable in self._variables.items() if not is_here(variable)}
        variables = list(self._variables.values())
        # One call for all: reading one by one takes longer than copying them. What is read does not change any more.
        self._read = tf.function(lambda: [v.read_value() for v in variables], autograph=False)

    @property
    def nbytes(self) -> int:
        return sum(_bytes(variable) for variable in self._variables.values())

    def now(self) -> TensorValues:
        if not self._far or self._may_hold(sum(_bytes(self._variables[name]) for name in self._far)):
            held = dict(zip(self._variables, self._read(), strict=True))
            return TensorValues({n: self._held(held, n) for n in self._variables}, True, not self._far)
        return TensorValues({n: self._live(n) for n in self._variables}, False, False)

    def _held(self, held: dict[str, Any], name: str) -> Tensor:
        if name not in self._far:
            return np.asarray(held[name])
        # Once it is fetched, the device's memory is free again.
        return _remote(held[name], lambda: np.asarray(held.pop(name)))

    def _live(self, name: str) -> Tensor:
        variable = self._variables[name]
        if name not in self._far:
            return np.asarray(variable.read_value())
        return _remote(variable, lambda: np.asarray(variable.read_value()))


def _is_on_cpu(value: Any) -> bool:
    return "/device:CPU:" in value.device or not value.device


def _bytes(value: Any) -> int:
    return int(np.prod(value.shape, dtype=np.int64)) * value.dtype.size


def _remote(value: Any, fetch: Callable[[], np.ndarray]) -> DeviceTensor:
    return DeviceTensor(np.dtype(value.dtype.as_numpy_dtype), tuple(value.shape), fetch)


class Copies:
    """Copies of values that later steps do not change, in memory that is used again.

    New memory is slow: the system clears each page of it when it is first written.

    Args:
        source: of the values.

    Attributes:
        filling: ends when the copies that were taken last are whole.
    """

    def __init__(self, source: TensorSource):
        self._source = source
        self._spare: dict[str, np.ndarray] = {}
        self._names: list[str] = []
        self.filling: Future[None] = Future()
        self.filling.set_result(None)

    def take(self) -> dict[str, np.ndarray]:
        """Return the present values, by name; they are there once `filling` has ended."""
        into, self._spare = self._spare, {}
        values = self._source.now()
        for name, value in values.tensors.items():
            if name not in into:
                into[name] = np.empty(value.shape, value.dtype)
        self._names = list(values.tensors)
        targets = {name: into[name] for name in self._names}
        copying = functools.partial(copy_all, list(targets.values()), list(values.tensors.values()))
        if values.is_held and not values.is_here:
            self.filling = in_thread(copying, "raytf-take")
        else:
            copying()
            self.filling = Future()
            self.filling.set_result(None)
        return targets

    def give_back(self, tensors: dict[str, np.ndarray]) -> None:
        """Take back copies that nobody uses any more. Other tensors among them are left alone."""
        if all(name in tensors for name in self._names):
            self._spare = {name: tensors[name] for name in self._names}


class Changes:
    """Finds out which of some variables the code between `begin` and `end` changes.

    On a CPU, values that are read share the variable's memory, and a variable whose value somebody holds is written to
    new memory. So a comparison of addresses tells that a variable has not changed, and only the others are compared.

    Args:
        of: returns the variables, the same ones with each call.
    """

    def __init__(self, of: Callable[[], Sequence[keras.Variable]]):
        self._of = of
        self._read: Callable[[], Sequence[Any]] | None = None
        self._before: list[np.ndarray] = []

    def begin(self) -> None:
        self._before = self._values()

    def end(self) -> list[int]:
        """Return the places of the variables that have changed since `begin`, and hold the values no longer."""
        before, self._before = self._before, []
        now = self._values()
        return [place for place, pair in enumerate(zip(before, now, strict=True)) if not _are_same(*pair)]

    def _values(self) -> list[np.ndarray]:
        if self._read is None:
            inner = [variable.value for variable in self._of()]
            self._read = tf.function(lambda: [each.read_value() for each in inner], autograph=False)
        return [np.asarray(value) for value in self._read()]


def _are_same(before: np.ndarray, now: np.ndarray) -> bool:
    is_same_memory = before.__array_interface__["data"] == now.__array_interface__["data"]
    return is_same_memory or before.tobytes() == now.tobytes()


def restore(named: dict[str, keras.Variable], tensors: dict[str, np.ndarray]) -> None:
    """Assign a checkpoint's tensors to a model's variables.

    Raises:
        CheckpointError: names or shapes differ; nothing is assigned then.
    """
    missing, extra = sorted(set(named) - set(tensors)), sorted(set(tensors) - set(named))
    wrong = [n for n in set(named) & set(tensors) if tuple(named[n].shape) != tensors[n].shape]
    if missing or extra or wrong:
        parts = [
            f"{what} {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            for what, names in (("it lacks", missing), ("it has in addition", extra), ("of another shape is", wrong))
            if names
        ]
        raise CheckpointError(f"the checkpoint is of another model: {'; '.join(parts)}.")
    for name, variable in named.items():
        variable.assign(tensors[name])


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """Return the state of every random generator that the model can draw from, Keras's global one included."""
    own = [v for v in model.variables if v.path.endswith("seed_generator_state")]
    everywhere = _keras.global_seed_state()
    return [*own, everywhere]


def weights_sha256(model: keras.Model) -> str:
    """Return the SHA-256 of all of `model.weights` in their order.

    Of each it takes dtype and shape as text (`float32 (3, 4)` and a line feed), then the values, little-endian, in C
    order. Names do not count, nor do the states of random generators.
    """
    digest = hashlib.sha256()
    for variable in model.weights:
        value = np.ascontiguousarray(keras.ops.convert_to_numpy(variable))
        digest.update(f"{value.dtype} {value.shape}\n".encode())
        digest.update(value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes())
    return digest.hexdigest()
