"""What a new group goes on from: the newest state, in memory or on storage, that every rank could read whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

import numpy as np

from raytf._process import in_thread
from raytf.checkpoint import durable, generations, manifest
from raytf.checkpoint.manifest import Checkpoint
from raytf.distributed import replica_agreement
from raytf.errors import CheckpointError
from raytf.storage.storage import Storage

if TYPE_CHECKING:  # it loads TensorFlow
    from raytf.checkpoint.snapshots import Snapshots
    from raytf.distributed.group import Ranks

#: What a checkpoint's document must say.
_NEEDED = ("identity", "history", "train_seconds", "imbalance_seconds", "stopped_early", "callbacks")
#: A snapshot in memory, or the name of a checkpoint on storage.
_Candidate = generations.Generation | str


class Restorer:
    """Finds and reads it; all ranks must call alike.

    Args:
        storage: the run's folder.
        snapshots: this rank's.
        group: of ranks.
        say: told what is skipped.

    Attributes:
        damaged: checkpoints on storage that could not be restored.
    """

    def __init__(self, storage: Storage, snapshots: Snapshots, group: Ranks, say: Callable[[str], None]):
        self._storage, self._snapshots, self._group, self._say = storage, snapshots, group, say
        #: What to try first; snapshots that come after that; checkpoints on storage, None where it was not asked.
        self._candidates: list[_Candidate] = []
        self._rest: list[generations.Generation] = []
        self._names: list[str] | None = None
        #: The first candidate, as it is being read.
        self._ahead: Future[Checkpoint] | None = None
        self.damaged: list[str] = []

    def begin(self, attempts: list[str], known_step: int | None) -> None:
        """See what there is, and read the newest state in the background.

        Args:
            attempts: before this one; snapshots of others are not the run's.
            known_step: of the newest checkpoint on storage, where the driver knows it.
        """
        snapshots = self._snapshots.find(attempts)
        # Where memory holds what the driver knows to be on storage, or later steps, storage need not be asked.
        newer = [] if known_step is None else [s for s in snapshots if s.step >= known_step]
        self._candidates, self._rest = [*newer], [snapshot for snapshot in snapshots if snapshot not in newer]
        if not newer:
            self._ask_storage()
        if self._candidates:
            self._ahead = in_thread(lambda: self._load(self._candidates[0]), "raytf-restore")

    def find(self, check: Callable[[Checkpoint], None]) -> Checkpoint | None:
        """The state to go on from; None for a new run.

        Args:
            check: raises where a checkpoint belongs to a run with other settings.

        Raises:
            CheckpointError: there are checkpoints, and none can be restored.
        """
        found = self._first_that_loads(check)
        if found is None and self._names is None:
            self._ask_storage()
            found = self._first_that_loads(check)
        if found is None and self._names:
            raise CheckpointError(
                f"none of the {len(self._names)} checkpoints in {self._storage.locate(manifest.FOLDER)} can be "
                "restored; the reasons are above. Mend them, or choose another --run name to begin anew."
            )
        return found

    def _ask_storage(self) -> None:
        self._names = self._list_durable()
        self._candidates = generations.candidates(self._rest, self._names)

    def _load(self, candidate: _Candidate) -> Checkpoint:
        if isinstance(candidate, str):
            return _complete(durable.load(self._storage, candidate))
        return self._snapshots.load(candidate)

    def _first_that_loads(self, check: Callable[[Checkpoint], None]) -> Checkpoint | None:
        for candidate in self._candidates:
            found, problem = None, ""
            ahead, self._ahead = self._ahead, None
            try:
                found = self._load(candidate) if ahead is None else ahead.result()
            except CheckpointError as error:  # not an outage of storage: that must not make a run begin anew
                problem = str(error)
            own = found.document.get("weights_hash", 0) if found is not None and found.is_in_memory else 0
            told = self._group.sum(np.append(np.float32(found is not None), replica_agreement.bits_of(own)))
            is_everywhere = told[0] == self._group.world_size
            if is_everywhere and found is not None and replica_agreement.all_equal(told[1:], self._group.world_size):
                check(found)
                return found
            problem = problem or (
                "the ranks did not agree on its weights" if is_everywhere else "another rank could not read it"
            )
            if isinstance(candidate, str):
                self.damaged.append(candidate)
                self._say(f"checkpoint {candidate} is skipped: {problem}")
            else:
                self._say(f"a snapshot is skipped: {problem}")
        return None

    def _list_durable(self) -> list[str]:
        names = manifest.list_complete(self._storage) if self._group.rank == 0 else []
        return json.loads(self._group.share(json.dumps(names).encode()))


def _complete(found: Checkpoint) -> Checkpoint:
    """A checkpoint whose document has what training goes on from.

    Raises:
        CheckpointError: it has not; what has them is checked with the manifest.
    """
    missing = [key for key in _NEEDED if key not in found.document]
    if missing:
        raise CheckpointError(f"checkpoint {found.name}: the manifest's document has no {missing[0]!r}.")
    return found
