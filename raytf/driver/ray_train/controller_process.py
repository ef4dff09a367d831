"""What the processes of Ray Train's controller, and of the actor that it has beside each group, do as they start."""

from __future__ import annotations

import importlib
import time

from raytf import _process
from raytf.training.process import warm_pool

#: A process that imported its modules less than this many seconds ago was not a warm one.
_COLD_SECONDS = 1.0
#: When this process did so.
_imported_at = float("-inf")


def variables() -> dict[str, str]:
    """The environment variables of a controller: its process, and each that is like it, imports what it needs as soon
    as it has started."""
    return warm_pool.calling(__name__, import_controller.__name__)


def import_controller() -> None:
    """Import what controllers need."""
    global _imported_at
    with _process.uncollected():
        for module in importlib.import_module("raytf._ray.train").CONTROLLER_MODULES:
            importlib.import_module(module)
    _imported_at = time.monotonic()


def has_just_imported() -> bool:
    """Whether this process was not a warm one."""
    return time.monotonic() - _imported_at < _COLD_SECONDS
