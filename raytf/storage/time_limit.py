"""A limit of time for a call to storage that cannot be interrupted."""

from __future__ import annotations

import threading
from collections.abc import Callable

from raytf.errors import StorageError
from raytf.storage.refusals import FIX

#: An endpoint that accepts a connection and never answers holds pyarrow for 25 to 35 s; a preflight does not wait.
PREFLIGHT_SECONDS = 15.0


def within(seconds: float, call: Callable[[], None], where: str) -> None:
    """Run `call` in a thread and give up on it after some seconds: pyarrow's calls cannot be interrupted."""
    outcome: list[BaseException | None] = []

    def run() -> None:
        try:
            call()
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, daemon=True, name="storage-preflight")
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise StorageError(f"{where} did not answer within {seconds:.0f} s. {FIX['unreachable']}", "unreachable")
    if outcome[0] is not None:
        raise outcome[0]
