"""Tests whether a store's conditional writes work: exactly one of several concurrent writers must win.

A store may refuse a condition, ignore it and write anyway, or check and write in two steps, so that several concurrent
writers all pass the check. Only a race shows this, and not every time, so several races run.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

#: Writers per race, the most races, and the fewest races, however long they take.
WRITERS, MOST_ROUNDS, LEAST_ROUNDS = 4, 6, 3
#: No further race starts after this time.
SECONDS = 2.0


class Objects(Protocol):
    """The methods of a store that a race uses; each may raise OSError."""

    def put(self, path: str, data: bytes, version: str | None) -> bool: ...
    def get(self, path: str) -> tuple[bytes, str] | None: ...
    def write(self, path: str, data: bytes) -> None: ...


def try_out(
    store: Objects, path: str, is_unsupported: Callable[[OSError], bool], clock: Callable[[], float] = time.monotonic
) -> dict[str, bool]:
    """Return whether exactly one of several writers wins, for `create` and for `swap`.

    The writers race for objects `path-N`, N < MOST_ROUNDS, which the caller deletes: see `leftovers`.

    Args:
        is_unsupported: returns whether an error means that the store does not know the condition.

    Raises:
        OSError: no writer succeeded.
    """
    began = clock()
    is_fair, has_won = {"create": True, "swap": True}, {"create": False, "swap": False}
    failure: OSError | None = None
    with ThreadPoolExecutor(WRITERS) as pool:
        for number in range(MOST_ROUNDS):
            if not any(is_fair.values()) or (number >= LEAST_ROUNDS and clock() - began > SECONDS):
                break
            target = f"{path}-{number}"
            for what in [what for what, fair in is_fair.items() if fair]:
                version = None
                if what == "swap":
                    if not is_fair["create"]:
                        store.write(target, b"raytf")
                    before = store.get(target)
                    if before is None:
                        continue
                    version = before[1]
                winners, content, errors = _race(store, pool, target, version)
                failure = next(iter(errors), failure)
                has_won[what] |= bool(winners)
                # At most one writer may win, with its content; after a lost response, a race has no winner.
                is_fair[what] = winners in ([], [content]) and not any(map(is_unsupported, errors))
    if failure is not None and not is_unsupported(failure) and not any(has_won.values()):
        raise failure
    # A store that refuses every writer is useless, too.
    return {what: is_fair[what] and has_won[what] for what in is_fair}


def leftovers(path: str) -> list[str]:
    """Return the names of all objects that `try_out` may have written."""
    return [f"{path}-{number}" for number in range(MOST_ROUNDS)]


def _race(
    store: Objects, pool: ThreadPoolExecutor, target: str, version: str | None
) -> tuple[list[bytes], bytes | None, list[OSError]]:
    """Run one race. Return the bodies that the store accepted, the content afterwards, and the errors."""
    line = threading.Barrier(WRITERS)

    def write(body: bytes) -> bool | OSError:
        line.wait(30)
        try:
            return store.put(target, body, version)
        except OSError as error:
            return error

    bodies = [f"raytf-{version}-{i}".encode() for i in range(WRITERS)]
    outcomes = list(pool.map(write, bodies))
    winners = [body for body, outcome in zip(bodies, outcomes, strict=True) if outcome is True]
    content = store.get(target) if winners else None
    return winners, content and content[0], [outcome for outcome in outcomes if isinstance(outcome, OSError)]
