"""The user's code and objects, sent to a run as bytes and unpickled where they are used.

Unpickling a model, layer or tensor creates TensorFlow variables, which a worker may do only after its strategy is set
up: `Collective ops must be configured at program startup`. So a parcel stays pickled until its first use.
"""

from __future__ import annotations

import contextlib
import io
import sys
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Generic, NamedTuple, TypeVar

from raytf._keras import live_objects
from raytf._process import in_thread
from raytf._tensorflow import datasets
from raytf.errors import ConfigError, DataError, JobError, RaytfError, WholeBatchError
from raytf.training.user import later_files

T = TypeVar("T")
Error = TypeVar("Error", bound=RaytfError)
#: Pickling a graph of layers recurses from each layer to the next, which is deep for a model of a thousand layers.
_STACK_BYTES, _RECURSION = 512 << 20, 1_000_000
#: Classes of variables: Keras's and TensorFlow's.
_VARIABLES = ("keras.src.backend.common.variables.Variable", "tensorflow.python.ops.variables.Variable")
#: Objects that this process has sent, by their keys in the pickle.
_sent: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()
#: Descriptions of objects that were replaced by stand-ins, inside a `noted` context; None outside.
_noted: list[str] | None = None
_STREAMS = ("stdout", "stderr", "stdin")


class Packed(NamedTuple):
    """A pickle, and the objects of this process that it refers to.

    Attributes:
        body: the pickle.
        variables: the variables that the value holds, in pickling order.
        files: the open files and summary writers that the value holds.
    """

    body: bytes
    variables: list[Any]
    files: list[Any]


class Parcel(Generic[T]):
    """A value that is pickled together with its Keras objects, and unpickled at its first use."""

    def __init__(self, value: T):
        self._value: T | None = value
        self._packed: Packed | None = None
        self._variables: list[Any] = []
        #: Descriptions of objects that stayed in this process when the value was pickled.
        self.left_behind: list[str] = []

    def get(self) -> T:
        """Return the value. In a process other than the one that made it, the first call unpickles a copy."""
        if self._value is None:
            self._value, self._variables = opened(self._pack().body)
        return self._value

    def variables(self) -> list[Any]:
        """Return all variables that the value holds, in the same order in each process."""
        packed, _ = self._pack(), self.get()
        return packed.variables or self._variables

    def files(self) -> list[Any]:
        """Return the open files and summary writers that the value holds; empty except in the process that made it."""
        return self._pack().files

    def _pack(self) -> Packed:
        if self._packed is None:
            with noted() as self.left_behind:
                self._packed = packed(self._value)
        return self._packed

    def __reduce__(self) -> tuple[Callable[[bytes], Parcel[T]], tuple[bytes]]:
        return _closed, (self._pack().body,)


def _closed(body: bytes) -> Parcel[Any]:
    parcel: Parcel[Any] = Parcel(None)
    parcel._packed = Packed(body, [], [])
    return parcel


def packed(value: Any) -> Packed:
    """Pickle a value with everything it holds: code of the main program, and live Keras objects with variables."""
    from raytf._ray import pickling

    variables: list[Any] = []
    files: list[Any] = []
    reducers = live_objects.REDUCERS | datasets.REDUCERS | REDUCERS | later_files.reducers(files)

    def noted(reduce: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def reducer(variable: Any) -> Any:
            variables.append(variable)
            return reduce(variable)

        return reducer

    reducers |= {kind: noted(reducers.get(kind, lambda _: NotImplemented)) for kind in _VARIABLES}
    # The list is pickled last: by then it has all variables of the value, and its pickle only refers to them.
    whole = live_objects.registered(), value, variables
    return Packed(_with_deep_stack(lambda: pickling.dumps(whole, reducers)), variables, files)


def opened(body: bytes) -> tuple[Any, list[Any]]:
    """Unpickle the value, and its variables, from the body of a `Packed`. Keras objects create TensorFlow variables."""
    from raytf._ray import pickling

    known, value, variables = pickling.loads(body)
    live_objects.loaded()
    live_objects.register(known)
    return value, variables


def _with_deep_stack(work: Callable[[], bytes]) -> bytes:
    limit, size = sys.getrecursionlimit(), threading.stack_size(_STACK_BYTES)
    try:
        sys.setrecursionlimit(_RECURSION)
        job = in_thread(work, "raytf-pickle")
    finally:
        threading.stack_size(size)
    try:
        return job.result()
    finally:
        sys.setrecursionlimit(limit)


# -- what cannot be sent -----------------------------------------------------------------------------------------------
#
# Callbacks and test classes often merely refer to such an object. In a worker, a standard stream becomes the worker's
# stream of that name, whose text is sent to the program, and a lock becomes a new lock. A generator becomes a stand-in,
# which raises an error on any use. Unpickled in the program, locks and stand-ins become the original objects again.
# Exceptions are handled here, too, since Python's own pickle fails for a class whose constructor passes on other
# arguments than it takes. So are unittest's test cases, which refer to their test runner.


class StandardStream:
    """Forwards to the stream of this name in `sys`, looked up at each use in the process that uses it."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(getattr(sys, self._name), name)

    def __iter__(self) -> Any:
        return iter(getattr(sys, self._name))

    def __reduce__(self) -> Any:
        return StandardStream, (self._name,)


class StandIn:
    """Stands for an object that stayed in the program's process; any use raises a ConfigError that names its kind."""

    def __init__(self, key: str, kind: str):
        self._key, self._kind = key, kind

    def _refuse(self, *_: Any) -> Any:
        raise ConfigError(
            f"code in a worker uses {self._kind}, which cannot be sent to a worker and stayed in the program's "
            "process. Create it in the method that uses it, such as the callback's on_train_begin."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python itself looks these up, without using the object
            raise AttributeError(name)
        return self._refuse()

    __iter__ = __next__ = __call__ = __enter__ = __exit__ = __len__ = __getitem__ = _refuse

    def __reduce__(self) -> Any:
        return _stand_in, (self._key, self._kind)


def _stand_in(key: str, kind: str) -> Any:
    own = _sent.get(key)
    return StandIn(key, kind) if own is None else own


def _new_lock(key: str, is_reentrant: bool) -> Any:
    own = _sent.get(key)
    if own is None:
        own = threading.RLock() if is_reentrant else threading.Lock()
    return own


def _key_of(value: Any) -> str:
    key = next((key for key, sent in _sent.items() if sent is value), None)
    if key is None:
        key = uuid.uuid4().hex
        _sent[key] = value
    return key


def _anything(value: Any) -> Any:
    """Return how to pickle a standard stream, which may be an object of any class."""
    for name in _STREAMS:
        if value is getattr(sys, name) or value is getattr(sys, f"__{name}__"):
            return StandardStream, (name,)
    return NotImplemented


@contextlib.contextmanager
def noted() -> Iterator[list[str]]:
    """Yield a list that collects descriptions of objects that stand-ins replace inside the `with` statement."""
    global _noted
    _noted = []
    try:
        yield _noted
    finally:
        _noted = None


def _left(value: Any, kind: str) -> Any:
    if _noted is not None and kind not in _noted:
        _noted.append(kind)
    return _stand_in, (_key_of(value), kind)


def _text_stream(stream: Any) -> Any:
    known = _anything(stream)
    if known is not NotImplemented or type(stream) in (io.TextIOWrapper, io.StringIO):
        return known  # a standard stream, or one that other functions pickle
    # A stream that replaced a standard one before, such as pytest's for a finished test.
    return _left(stream, f"the stream {type(stream).__name__}")


def _generator(generator: Any) -> Any:
    return _left(generator, f"the generator {generator.__qualname__}")


def _lock(lock: Any) -> Any:
    return _new_lock, (_key_of(lock), type(lock) is not type(threading.Lock()))


def _exception(error: BaseException) -> Any:
    own = [kind for kind in type(error).__mro__ if kind.__module__ != "builtins"]
    methods = {name for kind in own for name in vars(kind)}
    if "__init__" not in methods or methods & {"__reduce__", "__reduce_ex__", "__getstate__"}:
        return NotImplemented
    return made, (type(error), error.args), dict(vars(error))


def _test_case(test: Any) -> Any:
    return object.__new__, (type(test),), {name: value for name, value in vars(test).items() if name != "_outcome"}


def made(kind: type[BaseException], args: tuple[Any, ...]) -> BaseException:
    """Create an exception without calling its class's own constructor."""
    made = kind.__new__(kind, *args)
    # The constructor of the built-in base class sets fields such as `errno` and `code`.
    python: Any = next(base for base in kind.__mro__ if base.__module__ == "builtins")
    python.__init__(made, *args)
    made.args = args
    return made


#: Functions that pickle the objects of a class and of its subclasses.
REDUCERS: dict[str, Callable[[Any], Any]] = {
    "_io._TextIOBase": _text_stream,
    "_thread.RLock": _lock,
    "_thread.lock": _lock,
    "builtins.BaseException": _exception,
    "builtins.generator": _generator,
    "builtins.object": _anything,
    "unittest.case.TestCase": _test_case,
}


# -- exceptions of the program's own code ------------------------------------------------------------------------------
#
# A worker's error passes through Ray as a `RaytfError`, since Ray's processes do not have the program's classes. It
# carries the exception of the program's code as bytes, which the program unpickles.


def carrying(error: Error, raised: BaseException | None = None) -> Error:
    """Attach the exception of the program's code (by default the cause) to a worker's error, and return the error."""
    if error.original is None and isinstance(error, (JobError, DataError)) and not isinstance(error, WholeBatchError):
        cause = raised or error.__cause__
        while isinstance(cause, RaytfError):
            cause = cause.__cause__
        if cause is not None:
            error.original = _packed_exception(cause)
    return error


def original(error: RaytfError) -> BaseException | None:
    """Return the exception of the program's code that an error carries, with the error as a note and as its cause.
    Return None if there is none, or if it cannot be unpickled."""
    if error.original is None:
        return None
    try:
        raised = opened(error.original)[0]
    except Exception:  # unpickling a class of the program may raise anything
        return None
    if not isinstance(raised, BaseException):
        return None
    trace = f"{error.traceback.rstrip()}\n" if isinstance(error, JobError) and error.traceback else ""
    raised.add_note(f"{trace}raytf: {error}")
    if raised.__cause__ is None:
        raised.__cause__ = error
    return raised


def explanation(raised: BaseException) -> RaytfError | None:
    """Return the error that explains an exception from `original`; None for any other exception."""
    for other in (raised.__cause__, raised.__context__):
        if isinstance(other, RaytfError) and other.original is not None:
            return other
    return None


def _packed_exception(raised: BaseException) -> bytes | None:
    """Pickle an exception, leaving out a cause or attributes that cannot be pickled; None if the rest cannot either."""
    cause, attributes = raised.__cause__, dict(vars(raised))
    known = {name: value for name, value in attributes.items() if _can_travel(value)}
    for sent in ((cause, attributes), (None, attributes), (None, known)):
        try:
            return packed(_Raised(raised, *sent)).body
        except Exception:  # pickling an object of the program may raise anything
            continue
    return None


def _can_travel(value: Any) -> bool:
    try:
        packed(value)
    except Exception:  # pickling an object of the program may raise anything
        return False
    return True


class _Raised:
    """Pickles an exception with its cause and attributes, which Python's own pickle leaves out."""

    def __init__(self, raised: BaseException, cause: BaseException | None, attributes: dict[str, Any]):
        self._raised, self._cause, self._attributes = raised, cause, attributes

    def __reduce__(self) -> Any:
        raised = self._raised
        if self._attributes != vars(raised):  # not all of them can travel
            raised = made(type(raised), raised.args)
        return _restored, (raised, self._cause, self._raised.__suppress_context__, self._attributes)


def _restored(
    raised: BaseException, cause: BaseException | None, hides_context: bool, attributes: dict[str, Any]
) -> BaseException:
    raised.__cause__, raised.__suppress_context__ = cause, hides_context
    vars(raised).update(attributes)
    return raised
