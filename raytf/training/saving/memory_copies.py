"""Copies a rank's state into memory; all ranks copy after the same steps."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from raytf.checkpoint.commit import Commit
from raytf.checkpoint.memory import MemorySave, MemoryTier
from raytf.checkpoint.replicas import Replicas
from raytf.checkpoint.tier import Votes
from raytf.checkpoint.training_state import StateSource
from raytf.distributed.group import Ranks


class MemoryCopies:
    """Copies a state into the memory tier; every rank must make the same calls.

    Args:
        source: the state.
        tier: this rank's memory tier.
        group: all ranks.
        replicas: hashes the weights of each copy, to compare them; None if ranks do not compare their weights.
    """

    def __init__(self, source: StateSource, tier: MemoryTier, group: Ranks, replicas: Replicas | None):
        self._source = source
        self._tier = tier
        self._group = group
        self._replicas = replicas
        self._commit: Commit[MemorySave] = Commit(tier, group.world_size)

    @property
    def is_sealed(self) -> bool:
        """Return whether this rank's newest copy is complete."""
        return bool(self._commit.votes().written)

    def hear(self, unsealed: float) -> None:
        """Commit the newest copy if it is complete on all ranks.

        Args:
            unsealed: number of ranks whose flags for this call said that their newest copy is not complete yet.
        """
        # Flags are older than a copy of this step, and say nothing about it.
        if self._tier.turns.is_pending(self._source.progress.step):
            self._commit.advance(Votes(written=self._group.world_size - unsealed))

    def make(self, share_rank_zero: bool) -> None:
        """Copy the current state.

        Args:
            share_rank_zero: first send to all ranks what only rank 0 knows.
        """
        source, state = self._source, self._source.progress
        self._await_newest()
        if share_rank_zero:
            self._tier.share_rank_zero(source.extras(with_files=True) if self._group.rank == 0 else None)
        document = dataclasses.replace(
            state.document(source.identity, self._group.world_size),
            durable_step=state.durable_step,
            weights_hash=self._hash_weights(),
        )
        rows = source.rows_since(-1 if state.durable_step is None else state.durable_step)
        self._commit.begin(MemorySave(state.step, document, rows))

    def make_again(self) -> None:
        """Replace the newest copy, whose weights were wrong."""
        self._await_newest()
        self._commit.give_up()
        self.make(False)

    def settle(self) -> None:
        """Wait until the newest copy is complete on all ranks, or drop it where one of them failed to complete it."""
        self._tier.settle()
        failed = float(self._group.sum(np.array([self._commit.votes().failed], np.float32))[0])
        self._commit.advance(Votes(written=self._group.world_size - failed, failed=failed))

    def _await_newest(self) -> None:
        """Wait until the newest copy is complete everywhere, if it is of an earlier step."""
        if self._tier.turns.is_pending(self._source.progress.step):
            began = time.perf_counter()
            self.settle()
            self._tier.costs_also(time.perf_counter() - began)

    def _hash_weights(self) -> int | None:
        """Return the hash of this rank's weights, which is stored in the copy.

        Returns:
            None if ranks do not compare their weights.
        """
        if self._replicas is None:
            return None
        began = time.perf_counter()
        self._replicas.hash_weights(self._source.progress.step)
        self._source.weighed(self._source.progress.step, self._replicas.newest)
        self._tier.costs_also(time.perf_counter() - began)
        return self._replicas.newest
