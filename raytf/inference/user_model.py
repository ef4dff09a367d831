"""Calls a user's model: its errors become the job's, and Keras's global settings are restored."""

from __future__ import annotations

import contextlib
import inspect
import io
import logging
import site
import sysconfig
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from raytf._ray import pickling
from raytf.config import precision
from raytf.config.precision import Precision
from raytf.errors import JobError, RaytfError
from raytf.runs.program_output import Logged, Printed, ProgramOutput, Warned, is_own

#: Folders of code that does not belong to the program.
_LIBRARIES = (
    str(Path(__file__).parents[1]),
    sysconfig.get_path("stdlib"),
    sysconfig.get_path("purelib"),
    *site.getsitepackages(),
)
#: The program's warning filters, in the form of `warnings.filters`; None if nobody sent any.
_filters: list[Any] | None = None
#: The levels of the program's loggers, by name.
_levels: dict[str, int] = {}


def set_warning_filters(filters: Sequence[Any] | None) -> None:
    """Apply the program's warning filters to its code in this process from now on."""
    global _filters
    _filters = None if filters is None else list(filters)


def set_log_levels(levels: Mapping[str, int]) -> None:
    """Apply the levels of the program's loggers to its code in this process from now on."""
    global _levels
    _levels = dict(levels)


def set_precision(chosen: Precision) -> None:
    """Set Keras's default precision for everything that is created from now on."""
    keras.config.set_floatx(chosen.floatx)
    policy = chosen.policy if chosen.config is None else keras.dtype_policies.deserialize(chosen.config)
    keras.config.set_dtype_policy(policy)


@contextlib.contextmanager
def with_precision(chosen: Precision) -> Iterator[None]:
    """Set Keras's default precision while the `with` statement lasts."""
    before = precision.of_process()
    set_precision(chosen)
    try:
        yield
    finally:
        set_precision(before)


def run_user_code(what: str, call: Callable[[], Any], say: Callable[[ProgramOutput], None] | None = None) -> Any:
    """Call the program's code, and convert what it raises to a JobError.

    Args:
        what: the name of the code, for the message.
        call: calls the code.
        say: called with the code's prints, warnings and logs, which stay in this process by default. With it, a
            `sys.exit` or KeyboardInterrupt in the code also becomes a JobError.

    Raises:
        JobError: the code raised; its cause is the exception.
    """
    caught = (Exception,) if say is None else (Exception, SystemExit, KeyboardInterrupt)
    try:
        with contextlib.nullcontext() if say is None else _forwarded(say):
            return call()
    except RaytfError:
        raise
    except caught as error:
        raise JobError(f"{what} raised {described(error)}.", own_traceback(error), error) from error


def described(error: BaseException) -> str:
    """Return an exception's class, text and place: the last line in the program's code, or else in a library."""
    frames = traceback.extract_tb(error.__traceback__)
    where = next((frame for frame in reversed(frames) if not _is_library(frame.filename)), frames[-1])
    return f"{type(error).__name__}: {error} ({where.filename}:{where.lineno})"


def own_traceback(error: BaseException) -> str:
    """Return an exception's traceback as text, starting at the first line of the program's own code."""
    whole = traceback.TracebackException.from_exception(error)
    first = next((i for i, frame in enumerate(whole.stack) if not _is_library(frame.filename)), 0)
    whole.stack[:] = whole.stack[first:]
    return "".join(whole.format())


def _is_library(file: str) -> bool:
    return file.startswith(("<", *_LIBRARIES))


@contextlib.contextmanager
def _forwarded(say: Callable[[ProgramOutput], None]) -> Iterator[None]:
    """Forward prints, warnings and logs of this process while the `with` statement lasts."""
    out, err = _Forwarding(say, False), _Forwarding(say, True)
    seen: list[warnings.WarningMessage]
    with warnings.catch_warnings(record=True) as seen:
        if _filters is not None:
            warnings.resetwarnings()
            warnings.filters.extend(_filters)  # type: ignore[attr-defined]
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _logging_forwarded(say):
                yield
        finally:
            out.flush()
            err.flush()
            for warning in seen:
                message = warning.message if isinstance(warning.message, Warning) else warning.category(warning.message)
                body = pickling.dumps((message, warning.filename, warning.lineno), {})
                say(Warned(body, pickling.loads))


@contextlib.contextmanager
def _logging_forwarded(say: Callable[[ProgramOutput], None]) -> Iterator[None]:
    """Forward logs of this thread while the `with` statement lasts, instead of handling them in this process."""
    own, thread = logging.Logger.callHandlers, threading.get_ident()

    def pass_on(logger: logging.Logger, record: logging.LogRecord) -> None:
        if threading.get_ident() != thread or is_own(record.name):
            own(logger, record)
        else:
            say(Logged.of(record))

    before = {name: logging.getLogger(name).level for name in _levels}
    changed = [name for name, level in _levels.items() if before[name] != level]
    for name in changed:
        logging.getLogger(name).setLevel(_levels[name])
    logging.Logger.callHandlers = pass_on  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        logging.Logger.callHandlers = own  # type: ignore[method-assign]
        for name in changed:
            logging.getLogger(name).setLevel(before[name])


class _Forwarding(io.StringIO):
    """A text stream that forwards its text when it is flushed."""

    encoding = "utf-8"

    def __init__(self, say: Callable[[ProgramOutput], None], is_error: bool):
        super().__init__()
        self._say, self._is_error = say, is_error

    def flush(self) -> None:
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        if text:
            self._say(Printed(text, self._is_error))

    def close(self) -> None:
        """Only flush: the program may close its standard output, but others still write to it."""
        self.flush()


def takes_training(model: keras.Model) -> bool:
    """Return whether the model's `call` has a `training` argument."""
    parameters = inspect.signature(model.call).parameters
    return "training" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
