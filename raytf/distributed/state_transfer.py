"""Sends arrays directly from some ranks to the ranks that lack them, over separate connections.

A sum over all ranks could also transfer the arrays, as `broadcast` does, but then every rank copies and adds each byte.
Each giver first sends a ticket over the group: the address at which it listens, and a password.
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

#: Seconds between two checks whether an awaited rank is lost.
_LOOK_SECONDS = 0.1
_WORD_BYTES = 32
#: The byte that a taker sends when it has received everything.
_ACKNOWLEDGED = b"\1"


def hand(
    ranks: Ranks,
    host: str,
    is_over: Callable[[], bool],
    arrays: list[np.ndarray],
    givers: Sequence[int],
    takers: Sequence[int],
) -> list[np.ndarray]:
    """Copy the arrays of the givers, which all have the same bits, to the takers. Every rank must call this function.

    Args:
        ranks: the group.
        host: address at which others reach this rank.
        is_over: returns whether a rank is known to be lost, so that waiting for it is pointless.
        arrays: this rank's arrays. Takers' arrays have the same shapes and dtypes as givers', and are overwritten.
        givers, takers: ranks.

    Returns:
        The givers' arrays on givers and takers; unchanged arrays on other ranks.
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
    # This sum fails if a rank was lost. If only a connection has failed, `broadcast` still transfers the arrays.
    return ranks.broadcast(arrays, giver=givers[0]) if ranks.sum(np.array([not is_done], np.int32))[0] else arrays


def givers_of(givers: Sequence[int], takers: Sequence[int]) -> dict[int, int]:
    """Return the giver of each taker, distributing the takers evenly over the givers."""
    return {taker: givers[place % len(givers)] for place, taker in enumerate(takers)}


class Giver:
    """Sends arrays to ranks that connect to this machine with `ticket`."""

    def __init__(self, host: str):
        self._server, self._word = rendezvous.server_at(host), secrets.token_bytes(_WORD_BYTES)
        self.ticket = pickle.dumps((rendezvous.joined(host, self._server.getsockname()[1]), self._word))

    def give(self, arrays: Sequence[np.ndarray], takers: int, is_over: Callable[[], bool]) -> bool:
        """Send arrays, which must not change during the call, to this many takers in parallel, unless a rank is known
        to be lost. Return whether all takers have received them."""
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
    """Fill arrays with those of the giver of a ticket, and return whether everything arrived."""
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
    # The memoryview of a scalar or of an empty array cannot be cast to bytes.
    return array.reshape(-1).view(np.uint8).data


def _send(peer: socket.socket, what: memoryview) -> None:
    while len(what):
        what = what[peer.send(what) :]  # `sendall` would apply the time limit to the whole array


def _receive(peer: socket.socket, into: memoryview) -> None:
    while len(into):
        count = peer.recv_into(into)
        if not count:
            raise ConnectionError("the giver closed the connection")
        into = into[count:]
