"""Gradient tapes of a program's own, in a graph where tensors stand for variables."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

#: The tensors that variables stand for now, by the variable's `id`.
Current = Callable[[], Mapping[int, Any]]


@contextlib.contextmanager
def on_tensors(current: Current) -> Iterator[None]:
    """While the `with` statement lasts, tapes of this thread watch tensors in place of variables and differentiate by
    them.

    Args:
        current: the tensors that trainable variables stand for.
    """
    _install()
    token = _current.set(current)
    try:
        yield
    finally:
        _current.reset(token)


_current: contextvars.ContextVar[Current | None] = contextvars.ContextVar("current", default=None)
#: As a tape's attribute: what variables stood for when it began.
_TENSORS = "_raytf_tensors"


@functools.cache
def _install() -> None:
    """Have tapes ask for `_current`: once for the process, since threads may trace at the same time."""
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
    return places if tensors is None else tf.nest.map_structure(lambda each: tensors.get(id(each), each), places)


def depends(outputs: list[Any], sources: list[Any]) -> list[bool]:
    """For each output, whether it is computed from one of the sources, in a graph that holds all of them."""
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
            before = [each.op for each in at.inputs]
            unknown = [each for each in before if id(each) not in known]
            if unknown and not any(known.get(id(each)) for each in before):
                waiting.append(unknown[0])
            else:
                known[id(at)] = any(known.get(id(each), False) for each in before)
                waiting.pop()
        return known[id(op)]

    return [hasattr(output, "op") and reaches(output.op) for output in outputs]
