"""Arrays of some ranks, sent straight to others that lack them, over connections of their own.

A sum over all ranks could carry them too, as `broadcast` does, but then every rank copies and adds each byte.
Whoever gives tells the takers beforehand, over the group, where it listens and a word that lets them in.
"""

from __future__ import annotations

import hmac
import pickle
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from raytf.distributed.membership import rendezvous
from raytf.distributed.membership.peer_liveness import SILENT_SECONDS
from raytf.distributed.sockets import Callers

if TYPE_CHECKING:  # it loads TensorFlow
    from raytf.distributed.group import Ranks

#: Seconds between two looks whether a rank that is waited for is lost.
_LOOK_SECONDS = 0.1
_WORD_BYTES = 32
#: The byte that a taker sends when it has everything.
_ACKNOWLEDGED = b"\1"


def hand(
    ranks: Ranks,
    host: str,
    is_over: Callable[[], bool],
    arrays: list[np.ndarray],
    givers: Sequence[int],
    takers: Sequence[int],
) -> list[np.ndarray]:
    """Return the arrays of some ranks, which all have the same, bit for bit, on others; every rank must call it.

    Args:
        ranks: of the group.
        host: address at which others reach this rank.
        is_over: whether a rank is known to be lost, so that to wait for it is in vain.
        arrays: of the givers; the takers' have the same shapes and dtypes, and are written over.
        givers, takers: ranks.

    Returns:
        The givers' arrays on the takers.
    """
    sources, is_done = givers_of(givers, takers), True
    giver = Giver(host) if ranks.rank in sources.values() else None
    tickets = {
        rank: ranks.share(giver.ticket if giver and rank == ranks.rank else b"", rank)
        for rank in sorted(set(sources.values()))
    }
    if giver is not None:
        is_done = giver.give(arrays, sum(source == ranks.rank for source in sources.values()), is_over)
    elif ranks.rank in sources:
        is_done = take(tickets[sources[ranks.rank]], arrays)
    # A rank that is lost meanwhile is noticed here. If a connection alone has failed, sums still carry the arrays.
    return ranks.broadcast(arrays, giver=givers[0]) if ranks.sum(np.array([not is_done], np.int32))[0] else arrays


def givers_of(givers: Sequence[int], takers: Sequence[int]) -> dict[int, int]:
    """Return from whom each taker gets the arrays: the ranks that have them take turns."""
    return {taker: givers[place % len(givers)] for place, taker in enumerate(takers)}


class Giver:
    """Gives arrays to ranks that call this machine at an address; `ticket` is for them."""

    def __init__(self, host: str):
        self._server, self._word = rendezvous.server_at(host), secrets.token_bytes(_WORD_BYTES)
        self.ticket = pickle.dumps((rendezvous.joined(host, self._server.getsockname()[1]), self._word))

    def give(self, arrays: Sequence[np.ndarray], takers: int, is_over: Callable[[], bool]) -> bool:
        """Send arrays, which must not change meanwhile, to so many takers, side by side, unless a rank is known to be
        lost; return whether all have got them."""
        views, began = [_bytes_of(array) for array in arrays], time.monotonic()
        answers: list[Future[bool]] = []
        with ThreadPoolExecutor(takers) as pool, Callers(self._server, _WORD_BYTES) as callers:
            while len(answers) < takers and not is_over() and time.monotonic() - began < SILENT_SECONDS:
                for peer, message in callers.calls(_LOOK_SECONDS):
                    if hmac.compare_digest(message, self._word):
                        answers.append(pool.submit(_serve, peer, views))
                    else:
                        peer.close()  # a stranger
        return sum(answer.result() for answer in answers) == takers


def _serve(peer: socket.socket, views: Sequence[memoryview]) -> bool:
    with peer:
        peer.settimeout(SILENT_SECONDS)
        try:
            for view in views:
                _send(peer, view)
            return peer.recv(1) == _ACKNOWLEDGED
        except OSError:
            return False


def take(ticket: bytes, arrays: Sequence[np.ndarray]) -> bool:
    """Fill arrays with those of a giver; whether all of it has come."""
    address, word = pickle.loads(ticket)
    try:
        with socket.create_connection(rendezvous.parsed(address), SILENT_SECONDS) as peer:
            peer.sendall(word)
            for array in arrays:
                _receive(peer, _bytes_of(array))
            peer.sendall(_ACKNOWLEDGED)
    except OSError:
        return False
    return True


def _bytes_of(array: np.ndarray) -> memoryview:
    # A scalar's and an empty array's bytes cannot be cast from its own memoryview.
    return array.reshape(-1).view(np.uint8).data


def _send(peer: socket.socket, what: memoryview) -> None:
    while len(what):
        what = what[peer.send(what) :]  # `sendall` would have one time limit for all of it


def _receive(peer: socket.socket, into: memoryview) -> None:
    while len(into):
        count = peer.recv_into(into)
        if not count:
            raise ConnectionError("the other side has hung up")
        into = into[count:]
