"""Creates or swaps a file with one winner among concurrent writers, even on a store without conditional writes.

On such a store, a writer first creates a claim: an object with a unique name in a folder beside the file. Then it
lists the folder, and does not write if it finds another writer's claim. Every writer creates its claim before it
lists, so at least one of two writers sees the other. The writer with the smallest name keeps its claim until it is
alone. The others delete theirs, so one writer proceeds. A writer that is alone checks that the file is still as
expected, writes it, and deletes its claim last, so that later writers see the file. A claim that exists for
`EXPIRY_SECONDS` belongs to a dead process, and is deleted.

This works if a listing shows all earlier puts (writers wait a moment for that), and if no writer is suspended between
its listing and its write for longer than a claim lives. Otherwise two writers may both believe that they won. The file
then has the content of the last one, and the other writer finds out by reading the file: see `lease`.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable

from raytf.errors import StorageError
from raytf.storage.storage import Storage

#: Wait between creating a claim and listing all claims.
SETTLE_SECONDS = 1.0
#: A claim that is this old belongs to a dead process.
EXPIRY_SECONDS = 20.0
#: A listing that took longer is too old to act on.
_LIST_SECONDS = 5.0
_POLL_SECONDS = 0.25
_MOST_SECONDS = 120.0


def write(
    place: Storage,
    name: str,
    data: bytes,
    version: str | None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Write a file if it has this version (for None: if it does not exist); one of several writers wins on any store.

    Returns:
        Whether it was written.
    """

    def act() -> bool:
        return place.create(name, data) if version is None else place.swap(name, data, version)

    def is_over() -> bool:
        if version is None:
            return place.exists(name)
        present = place.get_version(name)
        return present is None or present[1] != version

    if place.is_conditional("create" if version is None else "swap"):
        return act()
    return not is_over() and alone(place, name, act, is_over, clock, sleep)


def folder_of(name: str) -> str:
    """Return the folder of the claims on a file."""
    return f"{name}.claims"


def alone(
    place: Storage,
    name: str,
    act: Callable[[], bool],
    is_over: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Call `act` once no other process claims the file, and return its result; return False if `is_over` before that.

    Args:
        act: writes the file if it is as expected, and returns whether it did.
        is_over: returns whether another process has written the file, so that waiting is pointless.

    Raises:
        StorageError: storage refuses a request, or other processes kept this one waiting for minutes.
    """
    folder, mine = folder_of(name), uuid.uuid4().hex
    seen: dict[str, float] = {}  # claims of others, and when each was first seen
    deadline = clock() + _MOST_SECONDS
    try:
        while clock() < deadline:
            listed = clock()
            claims = place.list(folder)
            seen = {other: seen.get(other, clock()) for other in claims if other != mine}
            for other in [other for other, since in seen.items() if clock() - since > EXPIRY_SECONDS]:
                place.delete(f"{folder}/{other}")
                del seen[other]
            if not seen and mine in claims:
                if clock() - listed < _LIST_SECONDS:
                    return act()
                continue
            if is_over():
                return False
            if seen:
                if mine in claims and min(seen) < mine:
                    place.delete(f"{folder}/{mine}")
                sleep(_POLL_SECONDS)
            else:  # no claim created yet, or another process deleted it as expired
                place.put(f"{folder}/{mine}", mine.encode())
                sleep(SETTLE_SECONDS)
    finally:
        with contextlib.suppress(StorageError):  # the claim expires by itself
            place.delete(f"{folder}/{mine}")
    raise StorageError(
        f"{place.locate(name)}: other processes have blocked this write for {_MOST_SECONDS:.0f} s. "
        f"If none are running, delete {place.locate(folder)}.",
        "unreachable",
    )
