"""Arrays go straight from ranks that have them to others, over real connections; strangers and the dead harm nobody."""

from __future__ import annotations

import pickle
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

from raytf.distributed import state_transfer
from raytf.distributed.membership import rendezvous


def arrays() -> list[np.ndarray]:
    draw = np.random.default_rng(0)
    return [
        draw.random((300, 1000), np.float32),
        np.array([np.nan, -0.0, np.inf], np.float32),
        np.array(7, np.int64),
        np.empty((0, 3), np.float64),
        np.array([True, False]),
        draw.random(5).astype(ml_dtypes.bfloat16),
    ]


def blanks() -> list[np.ndarray]:
    return [np.zeros_like(each) for each in arrays()]


@pytest.mark.parametrize(("givers", "takers"), [([0], [1]), ([1], [0, 2, 3]), ([0, 2], [1, 3, 4]), ([0, 1], [2])])
def test_takers_take_turns_with_givers(givers: list[int], takers: list[int]):
    found = state_transfer.givers_of(givers, takers)
    assert list(found) == takers
    served = [list(found.values()).count(giver) for giver in givers]
    assert max(served) - min(served) <= 1


@pytest.mark.parametrize("takers", [1, 3])
def test_all_that_call_get_every_bit(takers: int):
    giver, given = state_transfer.Giver("127.0.0.1"), arrays()
    with ThreadPoolExecutor(takers + 1) as pool:
        giving = pool.submit(giver.give, given, takers, lambda: False)
        taken = [blanks() for _ in range(takers)]
        assert list(pool.map(lambda own: state_transfer.take(giver.ticket, own), taken)) == [True] * takers
        assert giving.result() is True
    for own in taken:
        assert [each.tobytes() for each in own] == [each.tobytes() for each in given]


def test_strangers_get_nothing_and_hold_up_nobody():
    giver = state_transfer.Giver("127.0.0.1")
    address, _ = pickle.loads(giver.ticket)
    with ThreadPoolExecutor(2) as pool, socket.create_connection(rendezvous.parsed(address)) as silent:
        giving = pool.submit(giver.give, arrays(), 1, lambda: False)
        assert state_transfer.take(pickle.dumps((address, bytes(32))), blanks()) is False
        own = blanks()
        assert state_transfer.take(giver.ticket, own) is True
        assert own[0].tobytes() == arrays()[0].tobytes()
        silent.close()
        assert giving.result() is True


def test_a_taker_that_hangs_up_in_the_middle_has_not_got_it():
    giver = state_transfer.Giver("127.0.0.1")
    address, word = pickle.loads(giver.ticket)

    def half() -> None:
        with socket.create_connection(rendezvous.parsed(address)) as peer:
            peer.sendall(word)
            peer.recv(1000)

    threading.Thread(target=half, daemon=True).start()
    assert giver.give([np.zeros(1 << 24)], 1, lambda: False) is False


def test_nobody_waits_for_who_is_known_to_be_lost():
    giver, began = state_transfer.Giver("127.0.0.1"), time.monotonic()
    assert giver.give(arrays(), 1, lambda: True) is False
    assert time.monotonic() - began < state_transfer.SILENT_SECONDS
    assert state_transfer.take(giver.ticket, blanks()) is False
