"""What a user's program gives to a run, sent as bytes and opened where it is used.

A model, a layer or a tensor creates TensorFlow's variables when it is unpickled, which a worker may do only after its
strategy is set up: `Collective ops must be configured at program startup`. So a parcel arrives closed.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from raytf._keras import live_objects
from raytf._tensorflow import pickles
from raytf.training import later_files, left_behind

T = TypeVar("T")
#: A graph of layers is pickled from each one to the next: of a thousand layers that is a deep recursion.
_STACK_BYTES, _RECURSION = 512 << 20, 1_000_000
#: Classes of variables: Keras's and TensorFlow's.
_VARIABLES = ("keras.src.backend.common.variables.Variable", "tensorflow.python.ops.variables.Variable")


class Packed(NamedTuple):
    """A pickle, and what of this process is in it.

    Attributes:
        body: the pickle.
        variables: the variables that the value holds, in the order in which they are pickled.
        files: the open files and summary writers that it holds.
    """

    body: bytes
    variables: list[Any]
    files: list[Any]


class Parcel(Generic[T]):
    """A value that is pickled with the Keras objects it holds, and unpickled at its first use.

    Args:
        value: what is sent.
    """

    def __init__(self, value: T):
        self._value: T | None = value
        self._packed: Packed | None = None
        self._variables: list[Any] = []
        #: What stayed in this process when the value was pickled, in words.
        self.left_behind: list[str] = []

    def get(self) -> T:
        """The value; in another process than it was made in, a copy of it, made by the first call."""
        if self._value is None:
            self._value, self._variables = opened(self._pack().body)
        return self._value

    def variables(self) -> list[Any]:
        """Return all variables that the value holds, in the same order in each process."""
        packed, _ = self._pack(), self.get()
        return packed.variables or self._variables

    def files(self) -> list[Any]:
        """Return the open files and summary writers that are in the value, in the process that made it."""
        return self._pack().files

    def _pack(self) -> Packed:
        if self._packed is None:
            with left_behind.noted() as self.left_behind:
                self._packed = packed(self._value)
        return self._packed

    def __reduce__(self) -> tuple[Callable[[bytes], Parcel[T]], tuple[bytes]]:
        return _closed, (self._pack().body,)


def _closed(body: bytes) -> Parcel[Any]:
    parcel: Parcel[Any] = Parcel(None)
    parcel._packed = Packed(body, [], [])
    return parcel


def packed(value: Any) -> Packed:
    """Pickle a value with all that it holds: code of the main program, and live Keras objects with their variables."""
    from raytf._ray import pickling

    variables: list[Any] = []
    files: list[Any] = []
    reducers = live_objects.REDUCERS | pickles.REDUCERS | left_behind.REDUCERS | later_files.reducers(files)

    def noted(reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def reducer(variable: Any) -> Any:
            variables.append(variable)
            return reduce(variable)

        return reducer

    reducers |= {kind: noted(reducers.get(kind, lambda _: NotImplemented)) for kind in _VARIABLES}
    # The list is pickled last: it then has all variables of the value, and the pickle only refers to them.
    whole = live_objects.registered(), value, variables
    return Packed(_with_deep_stack(lambda: pickling.dumps(whole, reducers)), variables, files)


def opened(body: bytes) -> tuple[Any, list[Any]]:
    """Unpickle what `packed` has pickled; creates TensorFlow variables if Keras objects are in it."""
    from raytf._ray import pickling

    known, value, variables = pickling.loads(body)
    live_objects.loaded()
    live_objects.register(known)
    return value, variables


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
