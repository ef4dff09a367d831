"""Tests whether a store keeps its word about conditional writes: one of several writers at once must win.

A store may refuse a condition, ignore it and write all the same, or check first and write then, so that several writers
at once all see nothing. Only a race shows that, and only now and then, so there are several races.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

#: Writers of a race, the most races, and the least, however long they take.
WRITERS, MOST_ROUNDS, LEAST_ROUNDS = 4, 6, 3
#: No further race starts after this time.
SECONDS = 2.0


class Objects(Protocol):
    """The store; every method may raise OSError."""

    def put(self, path: str, data: bytes, version: str | None) -> bool: ...
    def get(self, path: str) -> tuple[bytes, str] | None: ...
    def write(self, path: str, data: bytes) -> None: ...


@dataclass(frozen=True)
class Conditions:
    """The writes for which one of several writers wins.

    Attributes:
        create: of an object that does not exist.
        swap: of an object that still has a version.
    """

    create: bool
    swap: bool


@dataclass(frozen=True)
class _WriteRace:
    """The outcome of several writers of one object.

    Attributes:
        winners: bodies that the store accepted.
        content: of the object afterwards.
    """

    winners: list[bytes]
    errors: list[OSError]
    content: bytes | None

    def is_fair(self) -> bool:
        """Return whether at most one writer has won, with its content; a lost answer makes a race without a winner."""
        return len(self.winners) <= 1 and (not self.winners or self.content == self.winners[0])


def try_out(
    store: Objects, path: str, is_unsupported: Callable[[OSError], bool], clock: Callable[[], float] = time.monotonic
) -> Conditions:
    """Let writers race for objects `path-N`, N < MOST_ROUNDS, which stay: see `leftovers`.

    Args:
        is_unsupported: (error) -> whether the store does not know the condition.

    Raises:
        OSError: no writer succeeded.
    """
    began = clock()
    can_create = can_swap = True
    has_created = has_swapped = False
    failure: OSError | None = None
    with ThreadPoolExecutor(WRITERS) as pool:
        for number in range(MOST_ROUNDS):
            if not (can_create or can_swap) or (number >= LEAST_ROUNDS and clock() - began > SECONDS):
                break
            target = f"{path}-{number}"
            if can_create:
                race = _race(store, pool, target, None)
                failure = next(iter(race.errors), failure)
                can_create = race.is_fair() and not any(map(is_unsupported, race.errors))
                has_created |= bool(race.winners)
            if not can_swap:
                continue
            if not can_create:
                store.write(target, b"raytf")
            before = store.get(target)
            if before is None:
                continue
            race = _race(store, pool, target, before[1])
            failure = next(iter(race.errors), failure)
            can_swap = race.is_fair() and not any(map(is_unsupported, race.errors))
            has_swapped |= bool(race.winners)
    if failure is not None and not is_unsupported(failure) and not (has_created or has_swapped):
        raise failure
    # A store that refuses everybody is of no use either.
    return Conditions(can_create and has_created, can_swap and has_swapped)


def leftovers(path: str) -> list[str]:
    """Return the names of all objects that `try_out` may have written."""
    return [f"{path}-{number}" for number in range(MOST_ROUNDS)]


def _race(store: Objects, pool: ThreadPoolExecutor, target: str, version: str | None) -> _WriteRace:
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
    return _WriteRace(winners, [o for o in outcomes if isinstance(o, OSError)], content and content[0])
