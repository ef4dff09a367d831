"""Changes how a program's own code behaves while a step is traced: draws, gradient tapes, and `tf.function`.

Each change applies only to the thread that makes it, since several threads may trace at the same time.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

T = TypeVar("T")


@contextlib.contextmanager
def _set(variable: contextvars.ContextVar[T], value: T) -> Iterator[None]:
    """Set a variable of this thread while the `with` statement lasts."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


# -- tf.random ---------------------------------------------------------------------------------------------------------


class _Seeds:
    """Makes a new seed, [2] int32, for each draw in one graph.
    Draws in other graphs get none, since those graphs, such as a user's traced function, may be used elsewhere, too."""

    def __init__(self, seed: Any, graph: Any):
        self._seed, self._graph, self._count = seed, graph, 0

    def next(self) -> Any:
        """Return the next seed, [2] int32; None in another graph."""
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


def seeded(seed: Any) -> contextlib.AbstractContextManager[None]:
    """Make draws of `tf.random` in the graph that this thread builds depend only on `seed` and on their order.
    The seed is [2] int32."""
    import tensorflow as tf

    _draw_from_seeds()
    return _set(_seeds, _Seeds(seed, tf.compat.v1.get_default_graph()))


@functools.cache
def _draw_from_seeds() -> None:
    """Patch operations that draw to use `_seeds`, once per process."""
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
        setattr(gen_random_ops, name, _seeded_operation(getattr(gen_random_ops, name), draw))


def _seeded_operation(own: Callable[..., Any], draw: Callable[..., Any]) -> Callable[..., Any]:
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


# -- gradient tapes ----------------------------------------------------------------------------------------------------

#: Returns the tensors that represent variables now, by the variable's `id`.
Current = Callable[[], Mapping[int, Any]]


def on_tensors(current: Current) -> contextlib.AbstractContextManager[None]:
    """Make this thread's tapes watch, and differentiate by, the tensors that represent trainable variables."""
    _watch_tensors()
    return _set(_current, current)


_current: contextvars.ContextVar[Current | None] = contextvars.ContextVar("current", default=None)
#: A tape's attribute: the tensors that represented variables when the tape began.
_TENSORS = "_raytf_tensors"


@functools.cache
def _watch_tensors() -> None:
    """Patch tapes to use `_current`, once per process."""
    import tensorflow as tf

    kind = tf.GradientTape
    kind.__enter__ = _entering(kind.__enter__, kind.watch)
    own_watch = kind.watch
    kind.watch = functools.wraps(own_watch)(lambda tape, tensor: own_watch(tape, _replaced(tape, tensor)))
    for name in ("gradient", "jacobian"):
        setattr(kind, name, _differentiating(getattr(kind, name)))


def _entering(own: Callable[..., Any], watch: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def enter(tape: Any) -> Any:
        entered, current = own(tape), _current.get()
        if current is not None:
            tensors = dict(current())
            setattr(tape, _TENSORS, tensors)
            if tape._watch_accessed_variables:
                for tensor in tensors.values():
                    watch(tape, tensor)
        return entered

    return enter


def _differentiating(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def differentiate(tape: Any, target: Any, sources: Any, *args: Any, **options: Any) -> Any:
        return own(tape, target, _replaced(tape, sources), *args, **options)

    return differentiate


def _replaced(tape: Any, places: Any) -> Any:
    import tensorflow as tf

    tensors = getattr(tape, _TENSORS, None)
    return places if tensors is None else tf.nest.map_structure(lambda place: tensors.get(id(place), place), places)


def depends(outputs: list[Any], sources: list[Any]) -> list[bool]:
    """Return for each output whether it is computed from one of the sources, which are all in one graph."""
    begin = {id(source.op) for source in sources}
    known: dict[int, bool] = {}

    def reaches(op: Any) -> bool:
        waiting = [op]
        while waiting:
            at = waiting[-1]
            if id(at) in begin:
                known[id(at)] = True
            if id(at) in known:
                waiting.pop()
                continue
            before = [tensor.op for tensor in at.inputs]
            unknown = [op for op in before if id(op) not in known]
            if unknown and not any(known.get(id(op)) for op in before):
                waiting.append(unknown[0])
            else:
                known[id(at)] = any(known.get(id(op), False) for op in before)
                waiting.pop()
        return known[id(op)]

    return [hasattr(output, "op") and reaches(output.op) for output in outputs]


# -- tf.function -------------------------------------------------------------------------------------------------------

_is_inlined: contextvars.ContextVar[bool] = contextvars.ContextVar("is_inlined", default=False)


def inlined() -> contextlib.AbstractContextManager[None]:
    """Make this thread trace functions decorated with `tf.function` anew at each call, as a part of the caller's graph.

    TensorFlow would reuse an earlier trace, made in another graph and with other values of the variables.
    """
    _trace_in_place()
    return _set(_is_inlined, True)


@functools.cache
def _trace_in_place() -> None:
    """Patch decorated functions to use `_is_inlined`, once per process."""
    from tensorflow.python.eager.polymorphic_function import polymorphic_function

    polymorphic_function.Function.__call__ = _inlined_call(polymorphic_function.Function.__call__)


def _inlined_call(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(function: Any, *args: Any, **options: Any) -> Any:
        if not _is_inlined.get():
            return own(function, *args, **options)
        if not function._autograph:
            return function._python_function(*args, **options)
        from tensorflow.python.autograph.core import ag_ctx
        from tensorflow.python.eager.polymorphic_function import autograph_util

        # The caller's graph is traced without AutoGraph, and this function would inherit that.
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED):
            return autograph_util.py_func_from_autograph(function._python_function)(*args, **options)

    return call
