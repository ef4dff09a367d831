"""What a new group goes on from: the newest state, in memory or on storage, that every rank could read whole."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

import numpy as np

from raytf.checkpoint import durable, manifest, policy
from raytf.checkpoint.manifest import Checkpoint
from raytf.errors import CheckpointError
from raytf.snapshots import Ranks, Snapshots
from raytf.storage import Storage


class Restorer:
    """Finds and reads it; all ranks must call alike.

    Args:
        storage: the run's folder.
        snapshots: this rank's.
        group: of ranks.
        check: raises where a checkpoint belongs to a run with other settings.
        say: told what is skipped.

    Attributes:
        damaged: checkpoints on storage that could not be restored.
    """

    def __init__(
        self,
        storage: Storage,
        snapshots: Snapshots,
        group: Ranks,
        check: Callable[[Checkpoint], None],
        say: Callable[[str], None],
    ):
        self._storage, self._snapshots, self._group, self._check, self._say = storage, snapshots, group, check, say
        self.damaged: list[str] = []

    def find(self, attempts: list[str], known_step: int | None) -> Checkpoint | None:
        """The state to go on from; None for a new run.

        Args:
            attempts: before this one; snapshots of others are not the run's.
            known_step: of the newest checkpoint on storage, where the driver knows it.

        Raises:
            CheckpointError: there are checkpoints, and none can be restored.
        """
        snapshots = self._snapshots.find(attempts)
        # Where memory holds what the driver knows to be on storage, or later steps, storage need not be asked.
        newer = [] if known_step is None else [s for s in snapshots if s.step >= known_step]
        found = self._first_that_loads(newer)
        if found is None:
            names = self._list_durable()
            rest = [snapshot for snapshot in snapshots if snapshot not in newer]
            found = self._first_that_loads(policy.candidates(rest, names))
            if found is None and names:
                raise CheckpointError(
                    f"none of the {len(names)} checkpoints in {self._storage.locate(manifest.FOLDER)} can be restored; "
                    "the reasons are above. Mend them, or choose another --run name to begin anew."
                )
        return found

    def _first_that_loads(self, candidates: Sequence[policy.Generation | str]) -> Checkpoint | None:
        for candidate in candidates:
            found, problem = None, ""
            try:
                if isinstance(candidate, str):
                    found = durable.load(self._storage, candidate)
                else:
                    found = self._snapshots.load(candidate)
            except CheckpointError as error:  # not an outage of storage: that must not make a run begin anew
                problem = str(error)
            loaded = self._group.sum(np.array([float(found is not None)], np.float32))[0]
            if loaded == self._group.world_size and found is not None:
                self._check(found)
                return found
            problem = problem or "another rank could not read it"
            if isinstance(candidate, str):
                self.damaged.append(candidate)
                self._say(f"checkpoint {candidate} is skipped: {problem}")
            else:
                self._say(f"a snapshot is skipped: {problem}")
        return None

    def _list_durable(self) -> list[str]:
        names = manifest.list_complete(self._storage) if self._group.rank == 0 else []
        return json.loads(self._group.share(json.dumps(names).encode()))
