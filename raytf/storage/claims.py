"""Create and swap of a file with one winner among all who try at once, also on a store that knows no conditions.

There, who wants to write puts up a claim first: an object of a name of its own in a folder beside the file. Then it
lists the folder. Who sees a claim of another one does not write: since each puts up its claim before it looks, of two
at least one sees the other. The one with the least name keeps its claim until it is alone, the others take theirs down,
so somebody goes on. Who is alone looks whether the file is still as expected, writes it, and takes its claim down last:
who comes after sees the file. A claim that stays for `EXPIRY_SECONDS` is a dead process's, and removed.

This holds where a list shows what was put before, which a moment's wait helps with, and while nobody is suspended
between its look and its write for longer than a claim lives. What is left: two that think they have won. The file has
one content all the same, that of the last writer, and the other one finds that out by reading: see `lease`.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable

from raytf.errors import StorageError
from raytf.storage.storage import Storage

#: Between a claim and the look at the others.
SETTLE_SECONDS = 1.0
#: A claim that is there for so long is a dead process's.
EXPIRY_SECONDS = 20.0
#: A look that is older is none.
_LOOK_SECONDS = 5.0
_POLL_SECONDS = 0.25
_MOST_SECONDS = 120.0


def create(
    place: Storage,
    name: str,
    data: bytes,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Write a file unless there is one; whether it was written. One of several writers wins, on any store."""
    if place.is_conditional("create"):
        return place.create(name, data)
    if place.exists(name):
        return False
    return alone(place, name, lambda: place.create(name, data), lambda: place.exists(name), clock, sleep)


def swap(
    place: Storage,
    name: str,
    data: bytes,
    version: str,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Write a file that is still of a version; whether it was written. One of several writers wins, on any store."""
    if place.is_conditional("swap"):
        return place.swap(name, data, version)

    def is_over() -> bool:
        found = place.get_version(name)
        return found is None or found[1] != version

    return alone(place, name, lambda: place.swap(name, data, version), is_over, clock, sleep)


def folder_of(name: str) -> str:
    """Where claims on a file are."""
    return f"{name}.claims"


def alone(
    place: Storage,
    name: str,
    act: Callable[[], bool],
    is_over: Callable[[], bool],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Act while nobody else has a claim on a file; what came of it, or False where it was over before.

    Args:
        act: writes the file if it is as expected, and says whether it did.
        is_over: whether somebody else has written it, so that it is no use to wait for one's turn.

    Raises:
        StorageError: of storage; or others have kept this process waiting for minutes.
    """
    folder, mine = folder_of(name), uuid.uuid4().hex
    seen: dict[str, float] = {}  # claims of others, and since when
    deadline = clock() + _MOST_SECONDS
    try:
        while clock() < deadline:
            looked = clock()
            claims = place.list(folder)
            seen = {other: seen.get(other, clock()) for other in claims if other != mine}
            for other in [other for other, since in seen.items() if clock() - since > EXPIRY_SECONDS]:
                place.delete(f"{folder}/{other}")
                del seen[other]
            if not seen and mine in claims:
                if clock() - looked < _LOOK_SECONDS:
                    return act()
                continue
            if is_over():
                return False
            if seen:
                if mine in claims and min(seen) < mine:
                    place.delete(f"{folder}/{mine}")
                sleep(_POLL_SECONDS)
            else:  # not put up yet, or taken for a dead process's
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
