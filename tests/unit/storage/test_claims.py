"""Of several who create or swap a file at once one wins, on a store that knows no conditions, or breaks its word."""

import functools
import random
import threading
import time

import pytest

from raytf.errors import StorageError
from raytf.storage import claims
from raytf.storage.storage import Storage

#: OpenStack Swift 2.38, one that knows neither condition but chunks, Swift 2.30, and one that overlooks conditions.
LACKS = {
    "no swap": {"create": "racy", "swap": "refused"},
    "neither": {"create": "refused", "swap": "refused"},
    "neither, no chunks": {"create": "refused", "swap": "refused", "chunks": False},
    "overlooks": {"create": "overlooked", "swap": "overlooked"},
}


def at_once(count, act):
    """What `act(i)` returned for each i < count, all begun at the same time."""
    line, found = threading.Barrier(count), {}

    def call(i):
        line.wait()
        try:
            found[i] = act(i)
        except Exception as error:
            found[i] = error

    threads = [threading.Thread(target=call, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[i] for i in range(count)]


@pytest.mark.parametrize("lack", LACKS)
def test_one_of_several_wins(behind, proxy, lack):
    proxy.lack(**LACKS[lack])
    places = [Storage(behind.uri) for _ in range(4)]
    created = at_once(4, lambda i: claims.write(places[i], "file", b"created by %d" % i, None))
    assert sorted(created) == [False, False, False, True]
    data, version = behind.get_version("file")
    assert data == b"created by %d" % created.index(True)
    swapped = at_once(4, lambda i: claims.write(places[i], "file", b"swapped by %d" % i, version))
    assert sorted(swapped) == [False, False, False, True]
    assert behind.get("file") == b"swapped by %d" % swapped.index(True)
    assert [f.name for f in behind.files()] == ["file"]


class Time:
    """A clock that only `sleep` moves."""

    def __init__(self):
        self.now = 0.0

    def clock(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


def test_a_dead_process_claim_is_waited_for_and_removed(behind, proxy):
    proxy.lack("refused", "refused")
    behind.put(f"{claims.folder_of('file')}/0000", b"killed")
    time = Time()
    assert claims.write(behind, "file", b"x", None, time.clock, time.sleep)
    assert claims.EXPIRY_SECONDS <= time.now <= claims.EXPIRY_SECONDS + 5
    assert [f.name for f in behind.files()] == ["file"]


def test_a_claim_that_others_removed_does_not_count(behind, proxy):
    """Who was suspended for longer than a claim lives puts it up again before it writes."""
    proxy.lack("refused", "refused")
    now, removed = Time(), []

    def sleep(seconds):
        now.now += seconds
        if not removed:
            behind.delete(claims.folder_of("file"))
            removed.append(now.now)

    assert claims.write(behind, "file", b"x", None, now.clock, sleep)
    assert now.now >= 2 * claims.SETTLE_SECONDS


class Shelf:
    """A folder in memory that all see alike; each look and each write takes a moment, of another length each time."""

    def __init__(self, draw):
        self.names, self.content, self.lock, self.draw = {}, None, threading.Lock(), draw

    def _wait(self):
        time.sleep(self.draw.random() * 0.004)

    def list(self, folder):
        self._wait()
        with self.lock:
            found = sorted(name.rpartition("/")[2] for name in self.names)
        self._wait()
        return found

    def put(self, name, data):
        self._wait()
        with self.lock:
            self.names[name] = data
        self._wait()

    def delete(self, name):
        self._wait()
        with self.lock:
            self.names.pop(name, None)

    def look_and_write(self, data):
        """As a store does without conditions."""
        self._wait()
        seen = self.content
        self._wait()
        self._wait()
        if seen is None:
            self.content = data
        return seen is None

    def locate(self, name):
        return name


def test_nobody_waits_for_ever():
    shelf, now = Shelf(random.Random(1)), Time()

    def sleep(seconds):  # one after another comes, and dies
        now.sleep(seconds)
        shelf.put(f"file.claims/{int(now.now / 10)}", b"x")

    with pytest.raises(StorageError, match=r"other processes .* delete file.claims"):
        claims.alone(shelf, "file", shelf.look_and_write, lambda: False, now.clock, sleep)
    assert shelf.content is None


@pytest.mark.parametrize("seed", range(5))
def test_the_protocol_needs_no_wait_where_lists_are_true(seed):
    """Safety comes from the order of put and list, not from time: here nobody waits before the look."""
    for number in range(6):
        shelf = Shelf(random.Random(100 * seed + number))
        won = at_once(4, functools.partial(take, shelf))
        assert sorted(won) == [False, False, False, True], won
        assert shelf.names == {}


def take(shelf, i):
    act = functools.partial(shelf.look_and_write, i)
    return claims.alone(shelf, "file", act, lambda: False, sleep=lambda seconds: time.sleep(seconds / 500))
