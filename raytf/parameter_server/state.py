"""How raytf uses ParameterServerStrategy: TensorFlow servers, the state on them, and its mirror in the coordinator.

The coordinator has a plain Keras model that is not trained itself: the mirror. The servers hold a copy of its weights,
layers' states and optimizer, and workers change that copy. When no worker computes, the servers' values are copied to
the mirror. So checkpoints, validation, callbacks and export see an ordinary model, with the same names as with any
other strategy.

A large variable is divided along its first axis (`MinSizePartitioner`), and all parts are spread over the servers by
their bytes. `ParameterServerStrategy` alone places them round-robin, which puts all kernels on one of two servers and
all biases on the other. An optimizer's variables are on the same server as their weights, and the server computes the
update. So only weights are sent to the workers, and gradients back.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from raytf import _keras
from raytf.errors import ModelError
from raytf.training.step.learning_rate import LearningRate

#: A variable is divided into parts of at least this many bytes.
MIN_PART_BYTES = 256 << 10
#: Optimizers that work elementwise, so that a part of a variable can be updated without the others.
_ELEMENTWISE = ("SGD", "Adam", "AdamW", "Adamax", "Nadam", "RMSprop", "Adagrad", "Adadelta", "Ftrl", "Lion")


def connect(cluster: dict[str, list[str]]) -> Any:
    """Create the coordinator of a strategy, and wait until all servers and workers answer.
    Call this before any TensorFlow operation."""
    # TensorFlow warns about each call that the coordinator itself makes, as it does for synchronous updates.
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    return tf.distribute.coordinator.ClusterCoordinator(tf.distribute.ParameterServerStrategy(resolver))


class ServerState:
    """Weights, layers' states and optimizer on the servers.

    Args:
        strategy: the strategy of the coordinator that `connect` returns.
        model: the mirror, built and compiled, with the initial values.
        states: variables of its layers that training changes.
        servers: number of servers.
        rate: learning rate of the mirror's optimizer; by default unchanged.

    Attributes:
        applied: the number of updates that the servers have applied. `assign_add` increments it, so none is lost.
        optimizer: the optimizer that works on the servers.

    Raises:
        ModelError: the optimizer has variables that cannot be matched with those on the servers.
    """

    def __init__(
        self,
        strategy: Any,
        model: keras.Model,
        states: Sequence[keras.Variable],
        servers: int,
        rate: LearningRate | None = None,
    ):
        self._strategy, self._model, self._states = strategy, model, list(states)
        weights = list(model.trainable_variables)
        cuts = [self._cut(v, servers) for v in weights]
        sizes = [n * _bytes(v) // max(1, sum(cut)) for v, cut in zip(weights, cuts, strict=True) for n in cut]
        places = iter(spread([*sizes, *(_bytes(v) for v in states)], servers))
        with strategy.scope():
            # The strategy places these round-robin, so there is one on each server; all others are colocated with them.
            anchors = [tf.Variable(0, dtype=tf.int64, trainable=False) for _ in range(servers)]
            self.applied = anchors[0]
            self._parts: list[list[keras.Variable]] = []
            for i, (v, cut) in enumerate(zip(weights, cuts, strict=True)):
                values = np.split(_value(v), np.cumsum(cut)[:-1]) if len(cut) > 1 else [_value(v)]
                constraint = v.constraint if len(cut) == 1 else None
                self._parts.append(
                    [
                        self._place(anchors[next(places)], value, v, f"weight_{i}_{p}", constraint)
                        for p, value in enumerate(values)
                    ]
                )
            self._held = [self._place(anchors[next(places)], _value(v), v, f"state_{i}") for i, v in enumerate(states)]
            self.optimizer = _like(model.optimizer)
        self._rate = (rate or LearningRate(model.optimizer, None)).of_copy(self.optimizer)
        self._sent_rate: float | None = None
        self._pairs = self._pair(weights)
        self._read = tf.function(lambda: [p.value.read_value() for _, ps in self._pairs for p in ps], autograph=False)
        self.push()

    def weights(self) -> list[tf.Tensor]:
        """Return the current weights on the servers; to be traced."""
        return [_whole([part.value.read_value() for part in parts]) for parts in self._parts]

    def states(self) -> list[tf.Tensor]:
        """Return the current layers' states on the servers; to be traced."""
        return [v.value.read_value() for v in self._held]

    def update(self, which: Sequence[int], gradients: Sequence[tf.Tensor]) -> None:
        """Update the weights at these indices once, on their servers; to be traced.
        The gradients are summed over the batch."""
        # Clipped here, since clipping may need all gradients at once, and each server has only some.
        clipped = _keras.clipped(self._model.optimizer, gradients)
        parts: list[keras.Variable] = []
        pieces: list[tf.Tensor] = []
        for i, gradient in zip(which, clipped, strict=True):
            parts += self._parts[i]
            sizes = [p.shape[0] for p in self._parts[i]] if len(self._parts[i]) > 1 else []
            pieces += tf.split(gradient, sizes, 0) if sizes else [gradient]
        # Keras increments its counter by reading, adding and writing, which would lose concurrent updates.
        self.optimizer.iterations.value.assign(tf.cast(self.applied.read_value(), self.optimizer.iterations.dtype))

        def apply(split_gradients: list[tf.Tensor]) -> None:
            # The strategy needs a tensor's device, which a traced tensor does not have. A copy made here is on the
            # replica's device.
            with self._rate.applied(self._rate.value()):
                self.optimizer.apply([tf.identity(g) for g in split_gradients], parts)

        self._strategy.run(apply, args=(pieces,))
        self.applied.assign_add(1)

    def add_to_states(self, which: Sequence[int], before: Sequence[tf.Tensor], after: Sequence[tf.Tensor]) -> None:
        """Add a batch's changes, `after` minus `before`, to the layers' states at these indices; to be traced.
        For an integer state, `after` already is the change."""
        for i, old, new in zip(which, before, after, strict=True):
            held = self._held[i].value
            more = new - tf.cast(old, new.dtype) if held.dtype.is_floating else tf.round(new)
            held.assign_add(tf.cast(more, held.dtype))

    def pull(self) -> int:
        """Copy the servers' values to the mirror, while no worker computes, and return the number of updates."""
        values = iter(t.numpy() for t in self._read())
        for mirror, parts in self._pairs:
            mirror.assign(np.concatenate([next(values) for _ in parts]) if len(parts) > 1 else next(values))
        applied = int(self.applied.numpy())
        self._model.optimizer.iterations.assign(applied)
        return applied

    def push(self) -> None:
        """Copy the mirror's values to the servers."""
        for mirror, parts in self._pairs:
            pieces = [_value(mirror)]
            if len(parts) > 1:
                pieces = np.split(pieces[0], np.cumsum([p.shape[0] for p in parts])[:-1])
            for part, piece in zip(parts, pieces, strict=True):
                part.value.assign(piece)
        self.applied.assign(int(_value(self._model.optimizer.iterations)))
        self._sent_rate = self._mirrored_rate()

    def push_rate(self) -> None:
        """Send the mirror's learning rate to the servers if it is a number that changed, even if workers compute."""
        rate = self._mirrored_rate()
        if rate is not None and rate != self._sent_rate:
            _keras.given_rate(self.optimizer).value.assign(rate)
            self._sent_rate = rate

    def _mirrored_rate(self) -> float | None:
        rate = _keras.given_rate(self._model.optimizer)
        return float(_value(rate)) if isinstance(rate, keras.Variable) else None

    def places(self) -> list[tuple[str, str, int]]:
        """Return (path of the weight, device, bytes) for each part."""
        paths = [v.path for v in self._model.trainable_variables]
        return [(path, p.value.device, _bytes(p)) for path, ps in zip(paths, self._parts, strict=True) for p in ps]

    def _cut(self, v: keras.Variable, servers: int) -> list[int]:
        if servers == 1 or not v.shape or v.constraint is not None or not _is_elementwise(self._model.optimizer):
            return [v.shape[0] if v.shape else 1]
        partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(MIN_PART_BYTES, servers)
        return rows(v.shape[0], partitioner(tf.TensorShape(v.shape), tf.as_dtype(v.dtype))[0])

    def _place(self, anchor: Any, value: np.ndarray, like: keras.Variable, name: str, constraint: Any = None) -> Any:
        with self._strategy.extended.colocate_vars_with(anchor):
            made = keras.Variable(value, dtype=like.dtype, trainable=like.trainable, name=name)
        made.constraint = constraint
        return made

    def _pair(self, weights: list[keras.Variable]) -> list[tuple[keras.Variable, list[keras.Variable]]]:
        """Return (variable of the mirror, its parts on the servers) for each variable that the servers hold."""
        own, copy = self._model.optimizer, _like(self._model.optimizer)
        numbers = {id(v): i for i, v in enumerate(weights)}
        there = {id(p): i for i, parts in enumerate(self._parts) for p in parts}
        # The roles of the variables of the mirror's optimizer are found by building a copy: it creates the same
        # variables in the same order.
        roles = _roles(copy, weights, numbers)
        with self._strategy.scope():
            server_roles = _roles(self.optimizer, [p for parts in self._parts for p in parts], there)
        excluded = {
            _keras.variable_key(self.optimizer, p)
            for v, parts in zip(weights, self._parts, strict=True)
            if own.weight_decay is not None and not _keras.decays(own, v.value)
            for p in parts
        }
        _keras.exclude_from_decay(self.optimizer, excluded)
        grouped: dict[Any, list[keras.Variable]] = {}
        for variable, role in zip(self.optimizer.variables, server_roles, strict=True):
            grouped.setdefault(role, []).append(variable)
        if len(roles) != len(own.variables) or set(roles) != set(grouped):
            raise ModelError(
                f"the optimizer {type(own).__name__} creates variables that cannot be spread over parameter servers. "
                "Use a Keras optimizer, or another --strategy."
            )
        pairs = [
            *zip(weights, self._parts, strict=True),
            *((v, [h]) for v, h in zip(self._states, self._held, strict=True)),
        ]
        return pairs + [(v, grouped[role]) for v, role in zip(own.variables, roles, strict=True)]


def _like(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Return another optimizer with the same settings, except clipping."""
    config = optimizer.get_config() | {"clipnorm": None, "global_clipnorm": None, "clipvalue": None}
    rate = _keras.given_rate(optimizer)
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        config["learning_rate"] = rate  # the object itself: `from_config` may not know its class
    return type(optimizer).from_config(config)


def _roles(optimizer: keras.optimizers.Optimizer, variables: list[Any], numbers: dict[int, int]) -> list[Any]:
    """Build an optimizer and find the role of each of its variables.

    Args:
        numbers: id of a variable in `variables` -> number of its weight.

    Returns:
        For each variable of the optimizer, ("of", number of its weight, index among that weight's variables) or, if it
        belongs to no weight, ("own", index, 0).
    """
    made: dict[int, tuple[str, int, int]] = {}
    counts: dict[int, int] = {}
    add = optimizer.add_variable_from_reference

    def note(reference_variable: Any, *args: Any, **kwargs: Any) -> Any:
        variable = add(reference_variable, *args, **kwargs)
        i = counts.setdefault(id(reference_variable), 0)
        counts[id(reference_variable)] += 1
        made[id(variable)] = ("of", numbers[id(reference_variable)], i)
        return variable

    optimizer.add_variable_from_reference = note
    try:
        optimizer.build(variables)
    finally:
        del optimizer.add_variable_from_reference
    roles: list[Any] = []
    for variable in optimizer.variables:
        roles.append(made.get(id(variable), ("own", sum(role[0] == "own" for role in roles), 0)))
    return roles


def _is_elementwise(optimizer: keras.optimizers.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("keras.") and type(optimizer).__name__ in _ELEMENTWISE


def _whole(parts: list[tf.Tensor]) -> tf.Tensor:
    return parts[0] if len(parts) == 1 else tf.concat(parts, 0)


def _value(variable: Any) -> np.ndarray:
    return np.asarray(keras.ops.convert_to_numpy(variable))


def _bytes(variable: keras.Variable) -> int:
    return int(np.prod(variable.shape, dtype=np.int64)) * tf.as_dtype(variable.dtype).size


def spread(sizes: Sequence[int], servers: int) -> list[int]:
    """Return the server of each variable. The largest is placed first, each on the server with the fewest bytes."""
    loads, places = [0] * servers, [0] * len(sizes)
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        places[i] = min(range(servers), key=lambda s: (loads[s], s))
        loads[places[i]] += max(1, sizes[i])
    return places


def rows(length: int, parts: int) -> list[int]:
    """Return the rows in each part of a variable divided along its first axis. Parts differ by at most one row."""
    parts = max(1, min(parts, length))
    return [length // parts + (i < length % parts) for i in range(parts)]
