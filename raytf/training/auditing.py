"""Audits of a run: which calls have one, and what becomes of a step of which two workers have computed other bits."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from raytf.checkpoint import void
from raytf.data.pipeline import CallBatch
from raytf.data.plan import assign
from raytf.data.sources.batches import LiveBatches
from raytf.distributed import audit, worker_table
from raytf.distributed.audit import AuditChoice, AuditVerdict
from raytf.errors import ReplicaError
from raytf.training.context import Context
from raytf.training.step import TrainStep

#: Steps between two audits where nobody says how many: one of at least as many shards, so less than 1 % of the time.
EVERY = 128


@dataclass(frozen=True)
class _Witness:
    """What a rank has to say about a step.

    Attributes:
        again: hashes of the digests that it computes.
        joined: step at which its process began to train.
        about: its host and device, for people.
    """

    again: tuple[bytes, ...]
    joined: int
    about: str


class Audits:
    """The audits of one rank, while the ranks are the same.

    Args:
        context: of the rank.
        step: of training.
        every: steps between two audits; 0 for none.
        joined: step at which this process began to train.
    """

    def __init__(self, context: Context, step: TrainStep, every: int, joined: int):
        self._context, self._step, self._joined = context, step, joined
        group, plan, source = context.attempt.group, context.plan, context.program.sources.train
        can_be = step.audit is not None and group.world_size > 1 and not isinstance(source, LiveBatches)
        self._every = every if can_be else 0
        self._spans = [assign(plan.shards, group.world_size)[rank] for rank in range(group.world_size)]

    def call_end(self, start: int, stop: int) -> int:
        """Where a call ends that would end at `stop`, so that an audited step has a call of its own."""
        if not self._every:
            return stop
        due = (start // self._every + 1) * self._every
        return min(stop, due if start == due - 1 else due - 1)

    def choice(self, start: int) -> AuditChoice | None:
        """What is audited in a call that begins at a step; None for nothing."""
        plan = self._context.plan
        if not audit.is_due(start + 1, self._every) or not plan.is_full(plan.locate(start)[1]):
            return None
        return audit.choose(self._context.config.batch.seed, start + 1, self._spans)

    def beside(self, start: int) -> int | None:
        """The shard of another rank that this one computes, too, in a call that begins at a step; None for none."""
        choice = self.choice(start)
        return choice.shard if choice is not None and choice.auditor == self._context.attempt.group.rank else None

    def settle(self, call: CallBatch, told: tuple[bytes, bytes]) -> NoReturn:
        """Find who computed a step wrongly, and have the run go back to a state in which that had no part; every rank
        must call it. The model is as before the step.

        Args:
            call: of the step.
            told: digests of the shard's owner and of its auditor.

        Raises:
            ReplicaError: always.
        """
        choice, group = self.choice(call.start), self._context.attempt.group
        assert choice is not None
        own = _Witness(self._again(choice.shard, call.start), self._joined, worker_table.whereabouts())
        witnesses: list[_Witness] = [pickle.loads(each) for each in worker_table.gather(group, pickle.dumps(own))]
        hashes = _hash(told[0]), _hash(told[1])
        verdict = audit.judge(choice, hashes, [witness.again for witness in witnesses])
        back = self._back_to(call.start, verdict, witnesses)
        text = sentence(call.stop, choice, verdict, [witness.about for witness in witnesses])
        honest = next((rank for rank in range(group.world_size) if rank not in verdict.culprits), 0)
        if group.rank == honest:
            attempt = self._context.attempt
            states = void.read(attempt.storage).and_after(back, [*attempt.earlier, attempt.name])
            void.write(attempt.storage, states)
            fields = {"of_step": call.stop, "shard": choice.shard, "ranks": list(verdict.culprits), "to_step": back}
            self._context.reporter.event("audit", text=text, **fields)
        group.sum(np.zeros(1, np.float32))  # nobody ends before that is written
        where = f"the run goes back to step {back}" if back else "the run begins again"
        raise ReplicaError(f"{text}; {where}", list(verdict.culprits), group.rank)

    def _again(self, shard: int, start: int) -> tuple[bytes, ...]:
        plan, pipeline = self._context.plan, self._context.program.pipeline
        call = pipeline.alone(shard, start)
        count = None if plan.is_even else int(call.counts[0])
        assert self._step.audit is not None
        leaves = [leaf[0] for leaf in call.leaves]
        return tuple(map(_hash, self._step.audit.again(leaves, call.seeds[0], count, plan.global_batch_size)))

    def _back_to(self, step: int, verdict: AuditVerdict, witnesses: Sequence[_Witness]) -> int:
        """The step up to which states count: before the culprits came; without one, the latest audit that agreed."""
        if verdict.culprits:
            return min(witnesses[rank].joined for rank in verdict.culprits)
        return max(0, step // self._every * self._every)


def sentence(step: int, choice: AuditChoice, verdict: AuditVerdict, about: Sequence[str]) -> str:
    """What a verdict says, for people.

    Args:
        about: host and device of each rank.
    """
    ranks = " and ".join(f"rank {rank} ({about[rank]})" for rank in verdict.culprits)
    where = f"step {step}, shard {choice.shard}"
    if not verdict.culprits:
        pair = f"rank {choice.owner} ({about[choice.owner]}) and rank {choice.auditor} ({about[choice.auditor]})"
        return f"{where}: {pair} have computed other bits, and nobody can say who is right: {verdict.why}"
    return f"{where}: {ranks} computes wrongly: it {verdict.why}"


def _hash(digest: bytes) -> bytes:
    return hashlib.sha256(digest).digest()[:16]
