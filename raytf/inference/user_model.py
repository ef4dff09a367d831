"""Calls into a user's model: their errors are the job's, and Keras's global settings are put back."""

from __future__ import annotations

import contextlib
import inspect
import io
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import keras

from raytf.config import precision
from raytf.config.precision import Precision
from raytf.errors import JobError, RaytfError


def set_precision(chosen: Precision) -> None:
    """Set Keras's defaults for all that is made from now on."""
    keras.config.set_floatx(chosen.floatx)
    policy = chosen.policy if chosen.config is None else keras.dtype_policies.deserialize(chosen.config)
    keras.config.set_dtype_policy(policy)


@contextlib.contextmanager
def with_precision(chosen: Precision) -> Iterator[None]:
    """Have Keras's defaults be these meanwhile."""
    before = precision.of_process()
    set_precision(chosen)
    try:
        yield
    finally:
        set_precision(before)


def run_user_code(what: str, call: Callable[[], Any], say: Callable[[str], None] | None = None) -> Any:
    """Call the user's code; what it raises becomes a JobError that is not retried, what it prints goes to `say`."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed) if say is not None else contextlib.nullcontext():
            return call()
    except RaytfError:
        raise
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise JobError(
            f"{what} raised {type(error).__name__}: {error} ({where.filename}:{where.lineno}).",
            traceback.format_exc(),
            error,
        ) from error
    finally:
        if say is not None:
            for line in printed.getvalue().splitlines():
                say(line)


def takes_training(model: keras.Model) -> bool:
    """Whether the model's `call` has a `training` argument."""
    parameters = inspect.signature(model.call).parameters
    return "training" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
