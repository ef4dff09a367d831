"""From which state a new group continues: decided from the copies in memory and the checkpoints on storage.

Lists go in, and candidates come out; `raytf.checkpoint.restore` asks nodes and storage, and reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass

from raytf.checkpoint.generations import Generation
from raytf.checkpoint.naming import restore_order, split_name

#: A copy in memory, or the name of a checkpoint on storage.
Candidate = Generation | str


@dataclass(frozen=True)
class RestorePlan:
    """What to try.

    Attributes:
        candidates: best first.
        later: copies in memory that are tried only after storage was asked: it is known to have a later step.
        asks_storage: whether storage has to be asked what it has.
        can_wait: whether the candidates are used without its answer if storage refuses.
    """

    candidates: tuple[Candidate, ...]
    later: tuple[Generation, ...] = ()
    asks_storage: bool = False
    can_wait: bool = False

    @classmethod
    def of(cls, copies: Collection[Generation], known_step: int | None, is_saving: bool) -> RestorePlan:
        """Return the plan before storage was asked.

        Args:
            copies: in memory, best first.
            known_step: step of the newest checkpoint that the driver knows to be on storage; None if it knows nothing.
            is_saving: whether a later one may have been committed without the driver having heard that it is complete.
        """
        newer = () if known_step is None else tuple(copy for copy in copies if copy.step >= known_step)
        later = tuple(copy for copy in copies if copy not in newer)
        return cls(newer, later, asks_storage=not newer or is_saving, can_wait=bool(newer))

    def listed(self, names: Collection[str]) -> RestorePlan:
        """Return the plan for what storage has: the latest step first; of equal steps the one in memory.

        Args:
            names: of complete checkpoints.
        """
        copies = [c for c in (*self.candidates, *self.later) if isinstance(c, Generation)]
        both: list[tuple[int, int, Candidate]] = [(copy.step, 1, copy) for copy in copies]
        both += [(split_name(name)[0], 0, name) for name in restore_order(names)]
        best_first = sorted(both, key=lambda entry: entry[:2], reverse=True)
        return RestorePlan(tuple(candidate for _, _, candidate in best_first))

    def unlisted(self) -> RestorePlan:
        """Return the plan if storage refuses and `can_wait`."""
        return dataclasses.replace(self, asks_storage=False)

    def failed(self) -> RestorePlan:
        """Return the plan after none of the candidates could be read, if storage was not asked."""
        return RestorePlan((), self.later, asks_storage=True)
