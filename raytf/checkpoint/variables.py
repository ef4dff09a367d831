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
    """Return name -> variable, always in the same order for a given model."""
    own, metrics = own_of(model), model.metrics_variables
    program = {f"{PROGRAM_PREFIX}{i:05d}/{v.name}": v for i, v in enumerate(program_of(model))}
    return _named(model, model.optimizer.variables, own, metrics) | program


def weights(model: keras.Model, optimizer: keras.optimizers.Optimizer | None = None) -> dict[str, keras.Variable]:
    """Return name -> variable for a model that is not compiled, without metrics. With an optimizer, also return the
    optimizer's variables and the variables that `own_of` returns."""
    if optimizer is None:
        return _named(model, [], [], [])
    return _named(model, optimizer.variables, own_of(model), [])


@contextlib.contextmanager
def unchanged(changing: Sequence[keras.Variable]) -> Iterator[list[tf.Variable]]:
    """Yield the TensorFlow variables inside Keras variables, and restore their values at exit. Until then, memory holds
    a copy of the values."""
    inner = [variable.value for variable in changing]
    before = [tf.identity(each) for each in inner]
    try:
        yield inner
    finally:
        for variable, value in zip(inner, before, strict=True):
            variable.assign(value)


#: The attribute of a model that holds the other variables of its custom `train_step`: see `keep`.
_OWN = "_raytf_own"


def keep(model: keras.Model, own: Sequence[keras.Variable]) -> None:
    """Add variables to a model's state that belong neither to its weights nor to its optimizer or named metrics."""
    vars(model)[_OWN] = list(own)


def own_of(model: keras.Model) -> list[keras.Variable]:
    """Return the variables that `keep` was called with; none for other models."""
    return vars(model).get(_OWN, [])


#: The attribute of a model that holds the program's variables that the training step reads: see `keep_program`.
_PROGRAM = "_raytf_program"
#: The prefix of their names in a state.
PROGRAM_PREFIX = "program/"


def keep_program(model: keras.Model, variables: Sequence[Any]) -> None:
    """Add variables of the program to a model's state: see `raytf.training.model.program_variables`."""
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
        # Paths differ between processes: their layer names count up with every model that a process makes.
        named.update({f"{part}/{i:05d}/{v.name}": v for i, v in enumerate(new)})
    return named


def sizes(named: Mapping[str, keras.Variable]) -> dict[str, int]:
    """Return how many values each variable has."""
    return {name: int(np.prod(v.shape, dtype=np.int64)) for name, v in named.items()}


def size_of(named: Mapping[str, keras.Variable]) -> int:
    """Return the size of all variables in bytes."""
    return sum(_bytes(v.value) for v in named.values())


def is_on_host(named: Mapping[str, keras.Variable]) -> bool:
    """Return whether the values are in the host's memory."""
    return all(_is_on_cpu(v.value) for v in named.values())


@dataclass(frozen=True)
class TensorValues:
    """The current values of some tensors.

    Attributes:
        tensors: by name.
        is_held: whether later steps leave the values unchanged; else copy them before the next step starts.
        is_here: whether all are in the host's memory.
    """

    tensors: Mapping[str, Tensor]
    is_held: bool
    is_here: bool


class TensorSource(Protocol):
    """A source of the values of a state's tensors, `nbytes` in total."""

    @property
    def nbytes(self) -> int: ...

    def now(self) -> TensorValues: ...


#: Makes a source of the tensors with these names.
MakeSource = Callable[[Sequence[str]], TensorSource]


class Variables:
    """The values of variables.

    On a CPU, the values are the variables' own buffers. On another device, they stay there until they are fetched, one
    by one. If the device has memory for a second copy, training continues during the fetch: while the old values of a
    variable are held, TensorFlow writes an update to new memory (copy on write). Otherwise the next step has to wait.

    Args:
        named: variables.
        names: names of the requested variables.
        may_hold: returns whether a device has memory for this many bytes besides the variables themselves.
        is_here: returns whether a tensor or a variable is in the host's memory; injected by tests, which have no GPU.
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
        # One call reads all: reading one by one takes longer than copying. Later steps do not change values once read.
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
        # `pop` frees the device's memory as soon as the value is fetched.
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
    """Copies of values that later steps do not change, in memory that is reused.

    New memory is slow: the system clears each page at its first write.

    Args:
        source: provides the values.

    Attributes:
        filling: done when the copies that `take` returned last are complete.
    """

    def __init__(self, source: TensorSource):
        self._source = source
        self._spare: dict[str, np.ndarray] = {}
        self._names: list[str] = []
        self.filling: Future[None] = Future()
        self.filling.set_result(None)

    def take(self) -> dict[str, np.ndarray]:
        """Return copies of the current values by name; they are complete once `filling` is done."""
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
        """Take back copies that the caller no longer needs. The next `take` reuses them if the set is complete."""
        if all(name in tensors for name in self._names):
            self._spare = {name: tensors[name] for name in self._names}


class Changes:
    """Detects which variables the code between `begin` and `end` changes.

    On a CPU, a value that was read shares the variable's memory, and an update of a variable whose value is held goes
    to new memory. So a variable with an equal address has not changed; only other variables are compared by value.

    Args:
        of: returns the variables, the same ones on each call.
    """

    def __init__(self, of: Callable[[], Sequence[keras.Variable]]):
        self._of = of
        self._read: Callable[[], Sequence[Any]] | None = None
        self._before: list[np.ndarray] = []

    def begin(self) -> None:
        self._before = self._values()

    def end(self) -> list[int]:
        """Return the positions of the variables that changed since `begin`, and release the held values."""
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
        CheckpointError: names or shapes differ; no variable has changed then.
    """
    missing, extra = sorted(set(named) - set(tensors)), sorted(set(tensors) - set(named))
    wrong = [n for n in set(named) & set(tensors) if tuple(named[n].shape) != tensors[n].shape]
    if missing or extra or wrong:
        parts = [
            f"{what} {names[0]}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
            for what, names in (("it lacks", missing), ("it also has", extra), ("it has another shape of", wrong))
            if names
        ]
        raise CheckpointError(f"the checkpoint belongs to another model: {'; '.join(parts)}.")
    for name, variable in named.items():
        variable.assign(tensors[name])


def seed_states(model: keras.Model) -> list[keras.Variable]:
    """Return the state of every random generator that the model can draw from, including Keras's global one."""
    own = [v for v in model.variables if v.path.endswith("seed_generator_state")]
    everywhere = _keras.global_seed_state()
    return [*own, everywhere]


def weights_sha256(model: keras.Model) -> str:
    """Return the SHA-256 of all of `model.weights` in their order.

    For each weight, it hashes dtype and shape as text (`float32 (3, 4)` and a line feed), then the values in
    little-endian C order. It does not include names or the states of random generators.
    """
    digest = hashlib.sha256()
    for variable in model.weights:
        value = np.ascontiguousarray(keras.ops.convert_to_numpy(variable))
        digest.update(f"{value.dtype} {value.shape}\n".encode())
        digest.update(value.astype(value.dtype.newbyteorder("<"), copy=False).tobytes())
    return digest.hexdigest()
