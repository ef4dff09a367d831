"""Ctrl-C and SIGTERM, for as long as a command has something to bring to its end."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def told_to_stop(handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Have both call the handler while the `with` statement lasts; in the main thread alone."""
    before = {number: signal.signal(number, handler) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
