"""What a store says about conditional writes is tried, each kind by itself and with several writers at once."""

import threading

import pytest

from raytf.storage import conditional_writes
from raytf.storage.conditional_writes import try_out


@pytest.mark.parametrize("create", ["atomic", "refused", "overlooked", "racy"])
@pytest.mark.parametrize("swap", ["atomic", "refused", "overlooked", "racy"])
def test_each_kind_is_tried_by_itself(behind, proxy, create, swap):
    proxy.lack(create, swap)
    assert behind.is_conditional("create") == (create == "atomic")
    assert behind.is_conditional("swap") == (swap == "atomic")
    assert behind.is_conditional() == (create == swap == "atomic")
    assert behind.list() == []  # the objects that writers raced for are gone


@pytest.mark.parametrize("how", ["atomic", "refused", "overlooked", "racy"])
def test_one_writer_at_a_time_may_do_all_on_any_store(behind, proxy, how):
    proxy.lack(how, how)
    assert behind.create("file", b"one")
    assert not behind.create("file", b"two")
    data, version = behind.get_version("file")
    assert data == b"one"
    assert not behind.swap("file", b"two", "another version")
    assert not behind.swap("missing", b"two", version)
    assert behind.swap("file", b"two", version)
    assert not behind.swap("file", b"three", version)
    assert behind.get("file") == b"two"
    assert behind.list() == ["file"]


def test_a_store_is_tried_once(behind, proxy):
    behind.is_conditional()
    before = proxy.writes
    assert before > 0
    for what in ("create", "swap", None):
        assert behind.is_conditional(what)
    assert proxy.writes == before


def test_a_store_may_lose_what_it_knew(behind, proxy):
    """Behind one address there may be servers of several versions."""
    assert behind.is_conditional()
    assert behind.create("file", b"one")
    proxy.lack("refused", "refused")
    _, version = behind.get_version("file")
    assert behind.swap("file", b"two", version)
    assert not behind.create("file", b"three")
    assert behind.get("file") == b"two"
    assert not behind.is_conditional("swap")


def test_failures_now_and_then_do_not_count_against_a_store(behind, proxy):
    proxy.fail_share(0.1, seed=3)
    assert behind.is_conditional()


class Memory:
    """A store in memory, whose answers can be lost: it writes, and says that it has not."""

    def __init__(self, lost=0, refuses=False):
        self.objects, self.lock, self.lost, self.refuses, self.serial = {}, threading.Lock(), lost, refuses, 0

    def put(self, path, data, version):
        with self.lock:
            found = self.objects.get(path, (b"", None))[1]
            if self.refuses or found != version:
                return False
            self.write(path, data)
            self.lost -= 1
            return self.lost < 0

    def get(self, path):
        return self.objects.get(path)

    def write(self, path, data):
        self.serial += 1
        self.objects[path] = (data, str(self.serial))


def never(error):
    return False


def test_answers_that_were_lost_make_no_second_winner():
    store = Memory(lost=2)
    assert try_out(store, "p", never) == {"create": True, "swap": True}
    assert set(store.objects) <= set(conditional_writes.leftovers("p"))


def test_a_store_that_refuses_everybody_is_of_no_use():
    assert try_out(Memory(refuses=True), "p", never) == {"create": False, "swap": False}


def test_a_store_that_cannot_be_reached_is_not_judged():
    class Gone(Memory):
        def put(self, path, data, version):
            raise OSError("no route")

        def get(self, path):
            raise AssertionError("nothing was written")

    gone = Gone()
    gone.get = lambda path: None
    with pytest.raises(OSError, match="no route"):
        try_out(gone, "p", never)


def test_trying_takes_seconds_at_most():
    now = [0.0]

    def clock():
        now[0] += conditional_writes.SECONDS + 1
        return now[0]

    store = Memory()
    assert try_out(store, "p", never, clock) == {"create": True, "swap": True}
    assert len(store.objects) == conditional_writes.LEAST_ROUNDS
