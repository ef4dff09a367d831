"""What a user's program gives to a run, sent as bytes and opened where it is used.

A model, a layer or a tensor creates TensorFlow's variables when it is unpickled, which a worker may do only after its
strategy is set up: `Collective ops must be configured at program startup`. So a parcel arrives closed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from raytf import _tensorflow
from raytf._keras import live_objects
from raytf.training import later_files

T = TypeVar("T")
#: A graph of layers is pickled from each one to the next: of a thousand layers that is a deep recursion.
_STACK_BYTES, _RECURSION = 512 << 20, 1_000_000


class Parcel(Generic[T]):
    """A value that is pickled with the Keras objects it holds, and unpickled at its first use.

    Args:
        value: what is sent.
    """

    def __init__(self, value: T):
        self._value: T | None = value
        self._body: bytes | None = None
        self._sent: list[Any] = []

    def get(self) -> T:
        """The value; in another process than it was made in, a copy of it, made by the first call."""
        if self._value is None:
            assert self._body is not None
            self._value = opened(self._body)
        return self._value

    def __reduce__(self) -> tuple[Callable[[bytes], Parcel[T]], tuple[bytes]]:
        if self._body is None:
            self._sent = []
            self._body = packed(self._value, self._sent)
        return _closed, (self._body,)

    @property
    def sent(self) -> list[Any]:
        """The open files and summary writers that are in the value."""
        self.__reduce__()
        return self._sent


def _closed(body: bytes) -> Parcel[Any]:
    parcel: Parcel[Any] = Parcel(None)
    parcel._body = body
    return parcel


def packed(value: Any, sent: list[Any] | None = None) -> bytes:
    """Pickle a value with all that it holds: code of the main program, and live Keras objects with their variables.

    Args:
        sent: gets the open files and summary writers that are in the value.
    """
    from raytf._ray import pickling

    whole = live_objects.registered(), value
    later = later_files.reducers([] if sent is None else sent)
    return _with_deep_stack(lambda: pickling.dumps(whole, live_objects.REDUCERS | _tensorflow.REDUCERS | later))


def opened(body: bytes) -> Any:
    """Unpickle what `packed` has pickled; creates TensorFlow variables if Keras objects are in it."""
    from raytf._ray import pickling

    known, value = pickling.loads(body)
    live_objects.loaded()
    live_objects.register(known)
    return value


def _with_deep_stack(work: Callable[[], bytes]) -> bytes:
    """Call in a thread with room for deep recursions."""
    result: list[Any] = []

    def call() -> None:
        try:
            result.append(work())
        except BaseException as error:
            result.append(error)

    limit, size = sys.getrecursionlimit(), threading.stack_size(_STACK_BYTES)
    try:
        sys.setrecursionlimit(_RECURSION)
        thread = threading.Thread(target=call)
        thread.start()
    finally:
        threading.stack_size(size)
    try:
        thread.join()
    finally:
        sys.setrecursionlimit(limit)
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]
