"""Functions that a program has decorated with `tf.function`, as parts of the graph that calls them."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator
from typing import Any

_is_inlined: contextvars.ContextVar[bool] = contextvars.ContextVar("is_inlined", default=False)


@contextlib.contextmanager
def inlined() -> Iterator[None]:
    """While the `with` statement lasts, calls of decorated functions in this thread are traced anew, each in its place.

    TensorFlow would take a trace that it has made before, in another graph and with other values of the variables.
    """
    _install()
    token = _is_inlined.set(True)
    try:
        yield
    finally:
        _is_inlined.reset(token)


@functools.cache
def _install() -> None:
    """Have decorated functions ask for `_is_inlined`: once for the process, as threads may trace at the same time."""
    from tensorflow.python.eager.polymorphic_function import polymorphic_function

    polymorphic_function.Function.__call__ = _asking(polymorphic_function.Function.__call__)


def _asking(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def call(function: Any, *args: Any, **options: Any) -> Any:
        if not _is_inlined.get():
            return own(function, *args, **options)
        if not function._autograph:
            return function._python_function(*args, **options)
        from tensorflow.python.autograph.core import ag_ctx
        from tensorflow.python.eager.polymorphic_function import autograph_util

        # The graph that calls it is traced without AutoGraph, which would count for this part of it, too.
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.ENABLED):
            return autograph_util.py_func_from_autograph(function._python_function)(*args, **options)

    return call
