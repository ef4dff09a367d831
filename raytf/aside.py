"""Work beside the work, in threads of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def in_thread(work: Callable[[], T], name: str = "raytf-save") -> Future[T]:
    """Run in a daemon thread of its own: one that hangs holds up neither the next one nor the end of the process."""
    job: Future[T] = Future()

    def run() -> None:
        try:
            job.set_result(work())
        except BaseException as error:
            job.set_exception(error)

    threading.Thread(target=run, daemon=True, name=name).start()
    return job
