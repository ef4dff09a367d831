"""A rank that trains nothing: it counts steps, copies its state into memory and onto storage with raytf's own code,
says where it is, and dawdles there until somebody kills it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from raytf.checkpoint import codec, manifest, slot_ledger, snapshot_slot
from raytf.checkpoint.commit import Commit, Event, Votes
from raytf.checkpoint.durable import DurableSave, DurableTier, Keep
from raytf.checkpoint.naming import GroupAttempt
from raytf.errors import StorageError
from raytf.storage.storage import Storage
from tests.stress.torture.restore import Memory, restore
from tests.stress.torture.state import Plan, Slowly, State

#: Steps between two copies in memory, and between two saves on storage.
_COPY_STEPS, _SAVE_STEPS = 2, 5
_STEP_SECONDS = 0.001


class FaultyStorage(Storage):
    """Storage of which a share of the calls fail: half of them before they took effect, half after.

    Args:
        share: in [0, 1].
    """

    def __init__(self, uri: str, share: float, seed: str):
        super().__init__(uri)
        self._share, self._draw = share, random.Random(seed)
        self.failures = 0

    def _do(self, what: str, name: str, call: Callable[[], Any]) -> Any:
        chance = self._draw.random()
        if chance >= self._share:
            return super()._do(what, name, call)
        if chance >= self._share / 2:
            super()._do(what, name, call)
        self.failures += 1
        raise StorageError(f"cannot {what} {self.locate(name)}: injected fault.", "other")


class Teller:
    """Tells the torturer where this rank is: in the lane `main` (the loop), and behind it in `save` and `retention`."""

    def __init__(self, fd: int, plan: Plan, rank: int):
        self._fd, self._plan, self._lock = fd, plan, threading.Lock()
        self._draw = random.Random(f"{plan.seed} {rank}")

    def tell(self, *words: Any) -> None:
        with self._lock:
            os.write(self._fd, json.dumps(words).encode() + b"\n")

    def enter(self, lane: str, moment: str) -> None:
        self.tell("at", lane, moment)
        self.dawdle(moment)

    def dawdle(self, moment: str, share: float = 1.0) -> None:
        """Wait a random time, longer where this attempt is to be killed."""
        most = self._plan.dawdle if moment == self._plan.moment else self._plan.dawdle / 8
        time.sleep(self._draw.uniform(0, most * share))

    def slowly(self, tensors: dict[str, np.ndarray], moment: str) -> Slowly:
        slow = Slowly(tensors)
        slow.wait = lambda: self.dawdle(moment, 1 / len(tensors))  # type: ignore[method-assign]
        return slow


class WatchedStorage(FaultyStorage):
    """Storage that tells which moment of a save its calls belong to."""

    teller: Teller
    lies = False

    def put(self, name: str, data: bytes | memoryview) -> None:
        moment = "manifest" if name.endswith(manifest.FILE) else "upload"
        self.teller.enter("save", moment)
        if not (self.lies and moment == "manifest"):
            super().put(name, data)
        self.teller.dawdle(moment, 0.3)

    def list(self, name: str = "") -> list[str]:
        # Only retention lists folders: what is restored is found by its files.
        with self._retention():
            return super().list(name)

    def delete(self, name: str) -> None:
        with self._retention():
            super().delete(name)

    @contextlib.contextmanager
    def _retention(self) -> Iterator[None]:
        self.teller.enter("retention", "retention")
        try:
            yield
        finally:
            self.teller.enter("retention", "")


class Group:
    """All-reduce of a few numbers over sockets; rank 0 adds."""

    def __init__(self, links: list[socket.socket]):
        self._links = links
        self.rank = 0

    def sum(self, values: list[float]) -> np.ndarray:
        """Sums over ranks, equal on every rank.

        Raises:
            ConnectionError: another rank has died.
        """
        own = np.array(values, np.float64)
        if self.rank:
            self._links[0].sendall(own.tobytes())
            return self._take(self._links[0], len(own))
        total = own + sum(self._take(link, len(own)) for link in self._links)
        for link in self._links:
            link.sendall(total.tobytes())
        return total

    def _take(self, link: socket.socket, count: int) -> np.ndarray:
        data = b""
        while len(data) < 8 * count:
            part = link.recv(8 * count - len(data))
            if not part:
                raise ConnectionError("another rank has died")
            data += part
        return np.frombuffer(data)


def run_rank(
    plan: Plan, rank: int, links: list[socket.socket], fd: int, storage: WatchedStorage, size: int, memory: Memory
) -> None:
    """Count steps until killed; when another rank is killed, wait for the same.

    Args:
        links: to all other ranks on rank 0, to rank 0 on the others.
        fd: of the pipe to the torturer.
        size: of the state, bytes.
        memory: of all nodes.
    """
    teller = Teller(fd, plan, rank)
    storage.teller, storage.lies = teller, plan.plant == "lying-store"
    group = Group(links)
    group.rank = rank
    try:
        _train(plan, rank, group, teller, storage, State(size), memory)
    except (ConnectionError, BrokenPipeError):
        signal.pause()


def _train(
    plan: Plan, rank: int, group: Group, teller: Teller, storage: WatchedStorage, state: State, memory: Memory
) -> None:
    teller.enter("main", "restore")
    found = restore(storage, memory)
    teller.dawdle("restore")
    if found.tier != "new" and (wrong := state.differs(found.step, found.tensors)):
        teller.tell("broken", f"a rank restored step {found.step} from {found.tier}: {wrong}")
    step, saved = found.step, found.step
    if list(group.sum([step, step * step])) != [plan.ranks * step, plan.ranks * step * step]:
        teller.tell("broken", f"ranks restored different steps, this one {step}")
    teller.enter("main", "")
    state.fill(step)
    attempt = GroupAttempt(plan.attempt, rank, plan.ranks)
    tier = DurableTier(storage, attempt, Keep(plan.keep), lambda text: teller.tell("said", text[:200]))
    tier.continue_from(found.name or None, list(found.skipped))
    save = Commit(tier, plan.ranks)
    sizes = {name: tensor.size for name, tensor in state.tensors.items()}
    mates = plan.mates(rank)
    place = slot_ledger.MemoryShare(0, plan.attempt, mates.index(rank), len(mates))
    to_copy = {n: state.tensors[n] for n in codec.shares(sizes, place.shares)[place.share]}
    to_save = {n: state.tensors[n] for n in codec.shares(sizes, plan.ranks)[rank]}
    pair = [snapshot_slot.Slot(path) for path in memory.paths(plan.attempt, rank)]
    while True:
        step += 1
        time.sleep(_STEP_SECONDS)
        state.fill(step)
        want = rank == 0 and save.is_idle and step - saved >= _SAVE_STEPS
        own = save.votes()
        votes = Votes(*group.sum([float(want), own.written, own.committed, own.failed]))
        if (save.is_idle and votes.want) or step % _COPY_STEPS == 0:
            teller.enter("main", "snapshot")
            share = slot_ledger.MemoryShare(step, plan.attempt, place.share, place.shares)
            pair[0].write(share, teller.slowly(to_copy, "snapshot"), {"step": step}, b"{}")
            pair.reverse()
            teller.tell("copied", step)
            teller.enter("main", "")

        def begin(step: int = step) -> DurableSave:
            copies = to_save if plan.plant == "no-copy" else {n: np.array(t) for n, t in to_save.items()}
            finite = [n for n in copies if n.startswith("model/")]
            return DurableSave(
                step, teller.slowly(copies, "write"), finite=finite, before=lambda: teller.enter("save", "write")
            )

        event = save.advance(votes, begin)
        if event is Event.BEGIN:
            saved = step
        elif event is Event.DONE:
            teller.tell("done", saved)
            teller.enter("save", "")
        elif event is Event.FAILED:
            teller.tell("failed", saved)
