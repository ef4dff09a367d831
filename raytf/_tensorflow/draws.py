"""`tf.random` in a model, drawn from given seeds in place of generators that belong to a process."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any


class _Seeds:
    """A new seed for each draw of a graph.

    Args:
        seed: [2] int32.
        graph: in which it may be used; what functions of the user's own trace may be used in other graphs, too.
    """

    def __init__(self, seed: Any, graph: Any):
        self._seed, self._graph, self._count = seed, graph, 0

    def next(self) -> Any:
        """[2] int32; None in another graph."""
        import tensorflow as tf
        from tensorflow.python.ops import control_flow_v2_func_graphs as graphs

        here, rounds = tf.compat.v1.get_default_graph(), []
        loops = graphs.WhileBodyFuncGraph, graphs.WhileCondFuncGraph
        while here is not self._graph and isinstance(here, (graphs.CondBranchFuncGraph, *loops)):
            if isinstance(here, loops):
                rounds.append(here.inputs[0])  # the loop's counter
            here = here.outer_graph
        if here is not self._graph:
            return None
        self._count += 1
        seed = tf.random.experimental.stateless_fold_in(self._seed, self._count)
        for counter in rounds:
            seed = tf.random.experimental.stateless_fold_in(seed, counter)
        return seed


_seeds: contextvars.ContextVar[_Seeds | None] = contextvars.ContextVar("seeds", default=None)


@contextlib.contextmanager
def seeded(seed: Any) -> Iterator[None]:
    """While the `with` statement lasts, draws of `tf.random` in the graph that this thread builds are functions of a
    seed and of their order.

    Args:
        seed: [2] int32.
    """
    import tensorflow as tf

    _install()
    token = _seeds.set(_Seeds(seed, tf.compat.v1.get_default_graph()))
    try:
        yield
    finally:
        _seeds.reset(token)


@functools.cache
def _install() -> None:
    """Have operations that draw ask for `_seeds`: once for the process, since threads may trace at the same time."""
    import tensorflow as tf
    from tensorflow.python.ops import gen_random_ops

    stateless = tf.random

    def normal(seed: Any, shape: Any, dtype: Any) -> Any:
        return stateless.stateless_normal(shape, seed, dtype=dtype)

    def truncated(seed: Any, shape: Any, dtype: Any) -> Any:
        return stateless.stateless_truncated_normal(shape, seed, dtype=dtype)

    def uniform(seed: Any, shape: Any, dtype: Any) -> Any:
        return stateless.stateless_uniform(shape, seed, dtype=dtype)

    def uniform_int(seed: Any, shape: Any, minval: Any, maxval: Any) -> Any:
        low = tf.convert_to_tensor(minval)
        return stateless.stateless_uniform(shape, seed, low, maxval, dtype=low.dtype)

    def shuffle(seed: Any, value: Any) -> Any:
        return stateless.experimental.stateless_shuffle(value, seed)

    def categorical(seed: Any, logits: Any, num_samples: Any, output_dtype: Any = tf.int64) -> Any:
        return stateless.stateless_categorical(logits, num_samples, seed, output_dtype)

    def gamma(seed: Any, shape: Any, alpha: Any) -> Any:
        whole = tf.concat([shape, tf.shape(alpha)], 0)
        return stateless.stateless_gamma(whole, seed, alpha, dtype=tf.convert_to_tensor(alpha).dtype)

    def poisson(seed: Any, shape: Any, rate: Any, dtype: Any = tf.int64) -> Any:
        return stateless.stateless_poisson(tf.concat([shape, tf.shape(rate)], 0), seed, rate, dtype)

    replaced: dict[str, Callable[..., Any]] = {
        "random_standard_normal": normal,
        "truncated_normal": truncated,
        "random_uniform": uniform,
        "random_uniform_int": uniform_int,
        "random_shuffle": shuffle,
        "multinomial": categorical,
        "random_gamma": gamma,
        "random_poisson_v2": poisson,
    }
    for name, draw in replaced.items():
        setattr(gen_random_ops, name, _asking(getattr(gen_random_ops, name), draw))


def _asking(own: Callable[..., Any], draw: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def operation(*args: Any, **options: Any) -> Any:
        seeds = _seeds.get()
        seed = None if seeds is None else seeds.next()
        if seed is None:
            return own(*args, **options)
        for name in ("seed", "seed2", "name"):
            options.pop(name, None)
        return draw(seed, *args, **options)

    return operation
