"""Exceptions of the program's own code, which come back to the program as themselves.

A worker's error is a `RaytfError` on its way through Ray, whose processes know nothing of the program's classes. It
carries the exception as bytes, which are opened in the program.
"""

from __future__ import annotations

from typing import Any, TypeVar

from raytf.errors import DataError, JobError, RaytfError, WholeBatchError
from raytf.training.user import user_code

Error = TypeVar("Error", bound=RaytfError)


def carrying(error: Error, raised: BaseException | None = None) -> Error:
    """Have an error carry the exception of the program's code that it explains; returns the error.

    Args:
        error: a worker's error.
        raised: the exception; by default the error's cause.
    """
    if error.original is None and isinstance(error, (JobError, DataError)) and not isinstance(error, WholeBatchError):
        cause = raised or error.__cause__
        while isinstance(cause, RaytfError):
            cause = cause.__cause__
        if cause is not None:
            error.original = _packed(cause)
    return error


def original(error: RaytfError) -> BaseException | None:
    """Return the exception of the program's code that an error explains, with the explanation as a note and its cause.

    Returns:
        None where there is none, or where it could not be pickled.
    """
    if error.original is None:
        return None
    try:
        raised = user_code.opened(error.original)[0]
    except Exception:  # whatever a class of the program's does when it is unpickled
        return None
    if not isinstance(raised, BaseException):
        return None
    trace = f"{error.traceback.rstrip()}\n" if isinstance(error, JobError) and error.traceback else ""
    raised.add_note(f"{trace}raytf: {error}")
    if raised.__cause__ is None:
        raised.__cause__ = error
    return raised


def explanation(raised: BaseException) -> RaytfError | None:
    """Return the error that explains an exception of `original`; None for any other exception."""
    for other in (raised.__cause__, raised.__context__):
        if isinstance(other, RaytfError) and other.original is not None:
            return other
    return None


def _packed(raised: BaseException) -> bytes | None:
    """Pickle an exception, without its cause or attributes where these cannot be pickled; None if the rest cannot."""
    cause, attributes = raised.__cause__, dict(vars(raised))
    known = {name: value for name, value in attributes.items() if _can_travel(value)}
    for sent in ((cause, attributes), (None, attributes), (None, known)):
        try:
            return user_code.packed(_Raised(raised, *sent)).body
        except Exception:  # whatever pickling an object of the program's raises
            continue
    return None


def _can_travel(value: Any) -> bool:
    try:
        user_code.packed(value)
    except Exception:  # whatever pickling an object of the program's raises
        return False
    return True


class _Raised:
    """Pickles an exception with what Python's own pickle leaves out of it.

    Args:
        raised: the exception.
        cause: its cause.
        attributes: its attributes.
    """

    def __init__(self, raised: BaseException, cause: BaseException | None, attributes: dict[str, Any]):
        self._raised, self._cause, self._attributes = raised, cause, attributes

    def __reduce__(self) -> Any:
        raised = self._raised
        if self._attributes != vars(raised):  # not all of them can travel
            raised = user_code.made(type(raised), raised.args)
        return _restored, (raised, self._cause, self._raised.__suppress_context__, self._attributes)


def _restored(
    raised: BaseException, cause: BaseException | None, hides_context: bool, attributes: dict[str, Any]
) -> BaseException:
    raised.__cause__, raised.__suppress_context__ = cause, hides_context
    vars(raised).update(attributes)
    return raised
