"""A rank's part in the memory tier: copies the state into memory, and lists and loads copies for a new group."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
import ray
from ray.actor import ActorHandle

from raytf.checkpoint import memory_keeper, slot_ledger, snapshot_slot
from raytf.checkpoint.codec import shares
from raytf.checkpoint.keeper_client import KeeperClient
from raytf.checkpoint.manifest import Checkpoint, CheckpointDocument
from raytf.checkpoint.naming import GroupAttempt
from raytf.checkpoint.slot_ledger import CopyTurns, SlotRequest, snapshot_every
from raytf.checkpoint.step_rows import StepRows
from raytf.checkpoint.training_state import Extras
from raytf.checkpoint.variables import MakeSource, TensorSource, TensorValues
from raytf.distributed.group import Ranks

#: The name of an additional tensor, with data that only rank 0 has.
_RANK_ZERO = "rank 0"
#: Names of further tensors -> arrays of the log's rows that are not on storage.
_LOG = {"log/rows": "numbers", "log/digests": "digests", "log/weights": "weights"}


#: The number of copies whose median time is the cost of a copy.
_COSTS = 9


@dataclasses.dataclass(frozen=True)
class MemorySave:
    """The data of a copy in memory besides the tensors, which the rank's source returns at that moment.

    Attributes:
        step: global steps that the state has seen.
        document: the state's document without `callbacks`, which `share_rank_zero` sends to all ranks.
        rows: rows of the log of steps that are not on storage.
    """

    step: int
    document: CheckpointDocument
    rows: StepRows


class MemoryTier:
    """Writes this rank's share of copies of the state into the memory of its node.

    A copy counts as soon as the copies of all ranks are complete. All ranks copy after the same steps, so every node of
    the run holds the same state, bit for bit.

    Args:
        run_uri: the run's folder.
        group: the group of all ranks.
        attempt: this start of the worker group. Copies of attempts other than it and earlier ones are not the run's.
        every_steps: steps between two copies; None to choose them by the cost of a copy, 0 for no copies.
        monitor: the driver's Monitor actor.
        say: reports problems.
        place: the result of `place_on_node`, if known.
    """

    def __init__(
        self,
        run_uri: str,
        group: Ranks,
        attempt: GroupAttempt,
        every_steps: int | None,
        monitor: ActorHandle,
        say: Callable[[str], None],
        place: tuple[int, int] | None = None,
    ):
        self._run_uri, self._group, self._attempt, self._every, self._say = run_uri, group, attempt, every_steps, say
        self._monitor = monitor
        self._share, self._shares = place_on_node(group) if place is None else place
        self._keeping: KeeperClient | None = None
        self._source: TensorSource | None = None
        self._slots: list[snapshot_slot.Slot] = []
        self.turns = CopyTurns()
        #: Seals the newest copy while training continues.
        self._sealer, self._sealing = ThreadPoolExecutor(1, thread_name_prefix="raytf-seal"), Future[None]()
        self._sealing.set_result(None)
        #: Whether the copies of earlier attempts on this node are deleted, and the pending question about it.
        self._is_tidy, self._tidying = False, None
        #: Seconds of the latest copies: for the copy itself, and for sending rank 0's data to all ranks.
        self._costs: list[tuple[float, float]] = []
        #: The encoded values that change only when an epoch ends, after the number of epochs at that time.
        self._slow: tuple[int | None, bytes] = (None, b"")
        self._rank_zero = np.zeros(0, np.uint8)
        self._wished = -1
        self._sharing_seconds = self._aside_seconds = 0.0
        #: Bytes of two copies on this node, and seconds for which copies have stopped training.
        self.bytes = 0
        self.seconds = 0.0

    def candidates(self) -> list[slot_ledger.Generation]:
        """Return snapshots of earlier attempts that at least one node holds whole, newest first."""
        if self._every == 0:
            return []
        earlier = self._attempt.earlier
        held = memory_keeper.survey(self._run_uri, is_enough=lambda answers: slot_ledger.is_latest(answers, earlier))
        return slot_ledger.generations(held, set(earlier))

    def load(self, candidate: slot_ledger.Generation) -> Checkpoint:
        """Return the verified state, with the `files` of callbacks if they are small.

        Raises:
            CheckpointError: the snapshot is damaged, or no longer exists.
        """
        loaded = memory_keeper.load(self._run_uri, candidate)
        tensors = dict(loaded.tensors)
        raw = tensors.pop(_RANK_ZERO)
        rows = StepRows.of_arrays({part: tensors.pop(name) for name, part in _LOG.items() if name in tensors})
        extras = Extras.unpack(raw.tobytes()) if raw.size else Extras()
        self._rank_zero = raw
        return dataclasses.replace(
            loaded,
            document=dataclasses.replace(loaded.document, callbacks=extras.callbacks),
            tensors=tensors | extras.arrays,
            rows=rows,
            files=extras.files,
        )

    def reserve(self, sizes: dict[str, int], make: MakeSource) -> None:
        """Request memory from this node's keeper. Copies are made once it has answered.

        Args:
            sizes: the number of values in each tensor of the state.
            make: creates the source of the tensors with the given names.
        """
        if self._every == 0:
            return
        self._source = make(shares(sizes, self._shares)[self._share])
        request = SlotRequest(self._attempt.name, self._share, 1, self._source.nbytes, self._attempt.driver)
        self._keeping = KeeperClient(self._run_uri, request, self._monitor)
        self._keeping.begin()

    def close(self) -> None:
        """Make no more copies. Existing copies stay with the node's keeper."""
        wait([self._sealing])
        for slot in self._slots:
            slot.close()
        self._slots, self._keeping = [], None
        self._sealer.shutdown(wait=False)

    def poll(self) -> None:
        """Query this node's keeper for its health and newest copy. A thread calls this with each heartbeat."""
        if self._keeping is not None:
            self._keeping.poll()

    @property
    def step(self) -> int | None:
        """The newest step for which this node's keeper holds a copy that can be restored; None if there is none."""
        self.poll()
        return None if self._keeping is None else self._keeping.step

    @property
    def copied(self) -> int | None:
        """The step of this rank's newest copy; None if there is none."""
        return self.turns.copied

    @property
    def is_empty(self) -> bool:
        """Return whether this rank has memory, but no copy in it yet."""
        return self._ready() and self.copied is None

    def wish(self, stop: int, step_seconds: float) -> float:
        """Return rank 0's vote for the call that ends at step `stop`: 1 to copy the state after it, else 0."""
        if self._every == 0 or self._group.rank != 0:
            return 0.0
        if self._every is None and not self._sealing.done():
            return 0.0  # training would wait for the copy that is still being fetched from the device
        cost = 0.0
        if self._costs:
            copying, sharing = zip(*self._costs, strict=True)
            # Ranks that share wait for each other, as they would in the next step. So only the shortest time counts.
            cost = float(np.median(copying)) + min(sharing)
        every = snapshot_every(self._every, cost, step_seconds)
        if self._wished >= 0 and stop - self._wished < every:
            return 0.0
        self._wished = stop
        return 1.0

    def share_rank_zero(self, extras: Extras | None) -> None:
        """Send the extras, which only rank 0 has, to all ranks. Every rank must call this, the others with None."""
        began = time.perf_counter()
        raw = self._group.share(b"" if extras is None else extras.pack())
        self._rank_zero = np.frombuffer(raw, np.uint8)
        self._sharing_seconds = time.perf_counter() - began

    def begin(self, save: MemorySave) -> None:
        """Copy this rank's share of the state. A second copy of the same step overwrites the first."""
        began = time.perf_counter()
        self.turns.ask(save.step)
        self.poll()  # since the last heartbeat, the keeper may have given this memory to other workers
        if not self._ready() or self._source is None:
            self._book(0.0)  # adds the time of sharing, and of other code, which training lost anyway
            return
        document, step = save.document, save.step
        if self._share == 0 and self._slow[0] != document.epochs:
            self._slow = (document.epochs, json.dumps(document.slow()).encode())
        own: dict[str, np.ndarray] = {}
        if self._share == 0:
            rows = save.rows.arrays()
            own = {_RANK_ZERO: self._rank_zero, **{name: rows[part] for name, part in _LOG.items()}}
        share, text = slot_ledger.MemoryShare(step, self._attempt.name, self._share, self._shares), self._slow[1]
        wait([self._sealing])
        if self._failure is not None:
            self._stop_after(self._failure)
            return
        first = self.copied is None
        try:
            slot, values = self._slots[self.turns.take(step)], self._source.now()

            def fill() -> None:
                size = slot.copy(share, {**values.tensors, **own}, document.live(), text)
                self.bytes = 2 * size * self._shares

            self._seal_soon(slot, fill, values)
        except (OSError, ValueError) as error:
            self._stop_after(error)
            return
        self._book(time.perf_counter() - began, counts=not first)  # the first copy is slower: its memory is new

    def _book(self, seconds: float, counts: bool = True) -> None:
        copying = seconds + self._aside_seconds
        sharing, self._sharing_seconds, self._aside_seconds = self._sharing_seconds, 0.0, 0.0
        self.seconds += copying + sharing
        if counts:
            self._costs = [*self._costs[1 - _COSTS :], (copying, sharing)]

    def costs_also(self, seconds: float) -> None:
        """Add seconds for which the next copy stops training in other code."""
        self._aside_seconds += seconds

    def abort(self) -> None:
        """Discard the newest copy. The next copy overwrites it, and the previous one is kept until then."""
        self.turns.abort()
        if self._failure is not None:
            self._stop_after(self._failure)

    @property
    def is_sealed(self) -> bool:
        """Whether this rank's newest copy is complete.

        It is true for a rank without memory, which has no copy to complete: other nodes hold the state.
        """
        return self._sealing.done() and not self.has_failed

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    @property
    def _failure(self) -> BaseException | None:
        """Why this rank's newest copy could not be completed; None if it is complete or under way."""
        return self._sealing.exception() if self._sealing.done() else None

    def settle(self) -> None:
        """Wait until this rank's newest copy is complete or has failed."""
        wait([self._sealing])

    def _seal_soon(self, slot: snapshot_slot.Slot, fill: Callable[[], None], values: TensorValues) -> None:
        if values.is_held and not values.is_here:
            # Fetch from the device during the next steps, which do not change the held values.
            self._sealing = self._sealer.submit(self._seal, slot, fill)
        else:
            fill()
            self._sealing = self._sealer.submit(self._seal, slot)

    def _seal(self, slot: snapshot_slot.Slot, fill: Callable[[], None] = lambda: None) -> None:
        fill()
        slot.seal()
        if self._is_tidy or self._keeping is None:
            return
        with contextlib.suppress(ray.exceptions.RayError):  # the keeper was killed, which the next poll detects
            # Repeat it after each copy, since another rank of this node may not have made its first copy yet.
            if self._tidying is not None and ray.wait([self._tidying], timeout=0)[0]:
                tidying, self._tidying = self._tidying, None
                self._is_tidy = ray.get(tidying)
            if not self._is_tidy:
                self._tidying = self._keeping.tidy()

    def _ready(self) -> bool:
        keeping = self._keeping
        if keeping is None:
            return False
        if keeping.is_lost:
            self._let_go()
            keeping.replace()
        if self._slots:
            return True
        place = keeping.take()
        if place is None:
            return False
        if place.reason:
            self._stop(f"no copies of the state in this node's memory: {place.reason}")
            return False
        try:
            self._slots = [snapshot_slot.Slot(path) for path in place.paths]
        except OSError:
            keeping.lose()  # the keeper has died since it answered
        return bool(self._slots)

    def _let_go(self) -> None:
        """Release the memory of a dead keeper, so that the next keeper can allocate it."""
        wait([self._sealing])
        for slot in self._slots:
            slot.close()
        had_copies = self.copied is not None
        self._slots, self.bytes = [], 0
        self.turns.lose()
        if had_copies and self._share == 0:
            self._say(
                f"rank {self._group.rank}: the keeper of copies in its node's memory died, and its copies are lost; "
                "another keeper is started, and the state is copied again"
            )

    def _stop_after(self, error: BaseException) -> None:
        self._stop(f"the state cannot be copied into memory: {str(error) or type(error).__name__}")

    def _stop(self, reason: str) -> None:
        self._slots, self._keeping, self.bytes = [], None, 0
        self.turns.lose()
        self._sealing = Future()
        self._sealing.set_result(None)
        self._say(f"rank {self._group.rank}: {reason}; after a failure the run continues from storage or other nodes")


def place_on_node(group: Ranks) -> tuple[int, int]:
    """Return this rank's index among the ranks of its node, and their number.

    Ray Train's local rank counts the ranks of an IP address, which several nodes may share.
    """
    node = int(ray.get_runtime_context().get_node_id()[:15], 16)
    mine = np.zeros((group.world_size, 2), np.int32)
    mine[group.rank] = [node >> 30, node & (1 << 30) - 1]
    ranks = [r for r, other in enumerate(group.sum(mine).tolist()) if other == mine[group.rank].tolist()]
    return ranks.index(group.rank), len(ranks)
