"""Create and swap of a file with one winner among all who try at once, also on a store that knows no conditions.

On such a store a writer first puts up a claim: an object with a name of its own in a folder beside the file. Then it
lists the folder, and does not write if it sees another writer's claim. Since each writer puts up its claim before it
lists, at least one of two sees the other. The writer with the least name keeps its claim until it is alone; the others
take theirs down, so one of them continues. A writer that is alone checks that the file is still as expected, writes it,
and takes its claim down last, so that later writers see the file. A claim that stays for `EXPIRY_SECONDS` belongs to a
dead process, and is removed.

This holds if a list shows what was put before, for which writers wait a moment, and if no writer is suspended between
its list and its write for longer than a claim lives. Otherwise two writers may think that they have won. The file then
has the content of the last one, and the other writer learns that by reading it: see `lease`.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable

from raytf.errors import StorageError
from raytf.storage.storage import Storage

#: Between a claim and the list of the others.
SETTLE_SECONDS = 1.0
#: A claim that is this old belongs to a dead process.
EXPIRY_SECONDS = 20.0
#: A list that took longer is too old to act on.
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
    """Write a file if it has this version, or if it does not exist for None; one of several writers wins, on any store.

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
    """Act while nobody else has a claim on a file. Return the result, or False if it was over before.

    Args:
        act: writes the file if it is as expected, and returns whether it did.
        is_over: whether somebody else has written it, so that waiting is of no use.

    Raises:
        StorageError: storage refuses, or other processes have kept this one waiting for minutes.
    """
    folder, mine = folder_of(name), uuid.uuid4().hex
    seen: dict[str, float] = {}  # claims of others, and since when
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
            else:  # not put up yet, or removed as a dead process's
                place.put(f"{folder}/{mine}", mine.encode())
                sleep(SETTLE_SECONDS)
    finally:
        with contextlib.suppress(StorageError):  # it expires
            place.delete(f"{folder}/{mine}")
    raise StorageError(
        f"{place.locate(name)}: other processes have kept it from being written for {_MOST_SECONDS:.0f} s. "
        f"Where there are none, delete {place.locate(folder)}.",
        "unreachable",
    )
