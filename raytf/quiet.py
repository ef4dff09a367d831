"""Libraries without their chatter, where what they write can be silenced in no other way."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator


def load_tensorflow() -> None:
    """Import TensorFlow and Keras."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if "tensorflow" in sys.modules:
        return
    with no_stderr():
        importlib.import_module("tensorflow")
        importlib.import_module("keras")


@contextlib.contextmanager
def no_stderr() -> Iterator[None]:
    """Nothing that this process writes to standard error is seen, whoever writes it."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # there is none
        yield
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nothing, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)
