"""Finds the state from which a new group continues: the newest that every rank can read, in memory or on storage."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from raytf._process import in_thread
from raytf.checkpoint.durable import DurableTier
from raytf.checkpoint.invalidated_states import VoidStates
from raytf.checkpoint.manifest import Checkpoint
from raytf.checkpoint.naming import restore_order, split_name
from raytf.checkpoint.slot_ledger import Generation
from raytf.distributed import step_agreement
from raytf.errors import CheckpointError, StorageError

if TYPE_CHECKING:
    from raytf.checkpoint.memory import MemoryTier
    from raytf.distributed.group import Ranks

_T = TypeVar("_T")
#: A copy in memory, or the name of a checkpoint on storage.
Candidate = Generation | str


class Restorer:
    """Finds and reads the state from which a group continues. All ranks must make the same calls.

    Args:
        memory: the memory tier, which reads the copies on the run's nodes.
        durable: the durable tier, which is told which checkpoint was restored and which are damaged.
        group: the group of all ranks.
        say: reports skipped checkpoints and snapshots.
        void: states that are no longer valid; those on storage are deleted.

    Attributes:
        damaged: checkpoints on storage that could not be restored.
        known_step: step of the newest checkpoint on storage that the driver or storage reported; None if neither did.
    """

    def __init__(
        self,
        memory: MemoryTier,
        durable: DurableTier,
        group: Ranks,
        say: Callable[[str], None],
        void: VoidStates | None = None,
    ):
        self._void = void or VoidStates()
        self._memory = memory
        self._durable = durable
        self._group = group
        self._say = say
        self._plan = RestorePlan(())
        #: Checkpoints on storage; None if storage was not asked, or failed.
        self._names: list[str] | None = None
        #: The read of the first candidate.
        self._ahead: Future[Checkpoint] | None = None
        self.damaged: list[str] = []
        self.known_step: int | None = None

    def begin(self, known_step: int | None, is_saving: bool = False) -> None:
        """List the candidates, and read the newest state in the background.

        Args:
            known_step: the step of the newest checkpoint on storage, if the driver knows it.
            is_saving: whether a later checkpoint may be on storage by now.
        """
        self.known_step = known_step
        self._plan = RestorePlan.of(self._shared(self._copies), known_step, is_saving)
        if self._plan.asks_storage:
            self._ask_storage()
        if self._plan.candidates:
            self._ahead = in_thread(lambda: self._load(self._plan.candidates[0]), "raytf-restore")

    def find(self, check: Callable[[Checkpoint], None]) -> Checkpoint | None:
        """Return the state from which to continue; None for a new run.

        Args:
            check: raises if a checkpoint belongs to a run with other settings.

        Raises:
            CheckpointError: there are checkpoints, but none can be restored.
        """
        checkpoint = self._first_that_loads(check)
        if checkpoint is None and self._names is None:
            self._plan = self._plan.failed()
            self._ask_storage()
            checkpoint = self._first_that_loads(check)
        if checkpoint is None and self._names:
            raise CheckpointError(
                f"none of the {len(self._names)} checkpoints in {self._durable.locate()} can be "
                "restored; the reasons are above. Fix them, or choose another --run name to begin again."
            )
        good = [split_name(name)[0] for name in self._names or () if name not in self.damaged]
        self.known_step = max(good, default=self.known_step)
        self._durable.continue_from(
            None if checkpoint is None or checkpoint.is_in_memory else checkpoint.name, self.damaged
        )
        return checkpoint

    def _copies(self) -> list[Generation]:
        return [copy for copy in self._memory.candidates() if not self._void.holds(copy.step, copy.attempt)]

    def _ask_storage(self) -> None:
        self._names = self._shared(self._stored)
        if self._names is not None:
            self._plan = self._plan.listed(self._names)

    def _stored(self) -> list[str] | None:
        """Return the checkpoints on storage, and delete invalid ones; None if storage fails and is not needed."""
        try:
            names = self._durable.candidates()
            invalid = self._void.among(names)
            if invalid:
                self._durable.delete(invalid, "a machine that took part in it computed wrongly")
        except StorageError:
            if not self._plan.can_wait:
                raise
            return None
        return [name for name in names if name not in invalid]

    def _load(self, candidate: Candidate) -> Checkpoint:
        if isinstance(candidate, str):
            return self._durable.load(candidate)
        return self._memory.load(candidate)

    def _first_that_loads(self, check: Callable[[Checkpoint], None]) -> Checkpoint | None:
        for candidate in self._plan.candidates:
            checkpoint, problem = None, ""
            ahead, self._ahead = self._ahead, None
            try:
                checkpoint = self._load(candidate) if ahead is None else ahead.result()
            except CheckpointError as error:  # not StorageError: an outage must not make a run start over
                problem = str(error)
            own = (checkpoint.document.weights_hash or 0) if checkpoint is not None and checkpoint.is_in_memory else 0
            sums = self._group.sum(np.append(np.float32(checkpoint is not None), step_agreement.bits_of(own)))
            is_everywhere = sums[0] == self._group.world_size
            if is_everywhere and checkpoint is not None and step_agreement.all_equal(sums[1:], self._group.world_size):
                check(checkpoint)
                return checkpoint
            problem = problem or (
                "the ranks did not agree on its weights" if is_everywhere else "another rank could not read it"
            )
            if isinstance(candidate, str):
                self.damaged.append(candidate)
                self._say(f"checkpoint {candidate} is skipped: {problem}")
            else:
                self._say(f"a snapshot is skipped: {problem}")
        return None

    def _shared(self, ask: Callable[[], _T]) -> _T:
        """Return, on all ranks, the result of `ask` on rank 0."""
        answer: _T = pickle.loads(self._group.share(pickle.dumps(ask() if self._group.rank == 0 else None)))
        return answer


@dataclass(frozen=True)
class RestorePlan:
    """The candidates to try, chosen from lists. `Restorer` queries nodes and storage, and reads the candidates.

    Attributes:
        candidates: the candidates, best first.
        later: copies in memory to try only after storage was asked, because storage has, or may have, a later step.
        asks_storage: whether storage has to be asked for its checkpoints.
        can_wait: whether the candidates are used without storage's answer if storage fails.
    """

    candidates: tuple[Candidate, ...]
    later: tuple[Generation, ...] = ()
    asks_storage: bool = False
    can_wait: bool = False

    @classmethod
    def of(cls, copies: Collection[Generation], known_step: int | None, is_saving: bool) -> RestorePlan:
        """Return the plan before storage is asked.

        Args:
            copies: copies in memory, best first.
            known_step: the step of the newest checkpoint that the driver knows to be on storage; None if it knows none.
            is_saving: whether a later checkpoint may be complete without a report to the driver.
        """
        newer = () if known_step is None else tuple(copy for copy in copies if copy.step >= known_step)
        later = tuple(copy for copy in copies if copy not in newer)
        return cls(newer, later, asks_storage=not newer or is_saving, can_wait=bool(newer))

    def listed(self, names: Collection[str]) -> RestorePlan:
        """Return the plan with the complete checkpoints on storage.
        The latest step is first and, of equal steps, the copy in memory."""
        copies = [c for c in (*self.candidates, *self.later) if isinstance(c, Generation)]
        both: list[tuple[int, int, Candidate]] = [(copy.step, 1, copy) for copy in copies]
        both += [(split_name(name)[0], 0, name) for name in restore_order(names)]
        best_first = sorted(both, key=lambda entry: entry[:2], reverse=True)
        return RestorePlan(tuple(candidate for _, _, candidate in best_first))

    def failed(self) -> RestorePlan:
        """Return the plan for when no candidate could be read and storage was not asked."""
        return RestorePlan((), self.later, asks_storage=True)
