"""Audits of a run: which calls have one, and what becomes of a step of which two workers have computed other bits."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import tensorflow as tf

from raytf.checkpoint import manifest, naming, void
from raytf.config.sections import ComputeSection
from raytf.data.pipeline import CallBatch
from raytf.data.plan import assign
from raytf.data.sources.batches import LiveBatches
from raytf.distributed import audit, replica_agreement, worker_table
from raytf.distributed.audit import AuditChoice, AuditVerdict, Standing
from raytf.errors import ReplicaError
from raytf.training import exact
from raytf.training.context import Context
from raytf.training.step import TrainStep

#: Steps between two audits of an exact run where nobody says how many: less than 1 % of the time.
EVERY = 128


def steps_between(compute: ComputeSection) -> int:
    """Steps between two audits; 0 for none.

    Without exact mode nobody promises that two machines compute the same bits, so that only who wants audits has them.
    """
    return (EVERY if compute.exact else 0) if compute.audit_every is None else compute.audit_every


@dataclass(frozen=True)
class _Witness:
    """What a rank has to say about a step.

    Attributes:
        again: hashes of the digests that it computes.
        weights: the hash of its weights.
        copied: step of the latest copy of which all ranks had the same weights; None for none.
        standing: of its process.
        about: its host and device, for people.
    """

    again: tuple[bytes, ...]
    weights: int
    copied: int | None
    standing: Standing
    about: str


class Audits:
    """The audits of one rank, while the ranks are the same.

    Args:
        context: of the rank.
        step: of training.
        every: steps between two audits; 0 for none.
        standing: of this process; kept up to date.
    """

    def __init__(self, context: Context, step: TrainStep, every: int, standing: Standing):
        self._context, self._step, self._standing = context, step, standing
        group, plan, source = context.attempt.group, context.plan, context.program.sources.train
        can_be = step.audit is not None and group.world_size > 1 and not isinstance(source, LiveBatches)
        self._every = every if can_be else 0
        self._spans = [assign(plan.shards, group.world_size)[rank] for rank in range(group.world_size)]

    def compare_machines(self) -> None:
        """Leave out audits where right machines may compute other bits than each other; every rank must call it."""
        context, group = self._context, self._context.attempt.group
        if not self._every or context.config.compute.exact:
            return
        own = json.dumps([exact.machine(), tf.config.threading.get_intra_op_parallelism_threads()])
        machines = [each.decode() for each in worker_table.gather(group, own.encode())]
        if self._step.is_on_gpu:
            why = "GPUs compute the same bits twice with --exact alone"
        elif len(set(machines)) > 1:
            why = f"the workers' machines may compute other bits: {' and '.join(sorted(set(machines)))}"
        else:
            return
        self._every = 0
        if context.is_first_rank:
            context.reporter.say(f"--audit-every: no step is audited, since {why}")

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

    def agreed(self, call: CallBatch) -> None:
        """A call is made, and if it had an audit, that agreed."""
        choice = self.choice(call.start)
        if choice is not None and self._context.attempt.group.rank in (choice.owner, choice.auditor):
            self._standing.vouched = call.stop

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
        own = self._witness(choice.shard, call.start)
        witnesses: list[_Witness] = [pickle.loads(each) for each in worker_table.gather(group, pickle.dumps(own))]
        hashes = _hash(told[0]), _hash(told[1])
        weights = replica_agreement.judge([witness.weights for witness in witnesses])
        if weights is None:
            verdict = audit.judge(choice, hashes, [witness.again for witness in witnesses])
        else:
            verdict = audit.of_weights(weights)
        text = sentence(call.stop, choice, verdict, [witness.about for witness in witnesses])
        honest = next((rank for rank in range(group.world_size) if rank not in verdict.culprits), 0)
        # Nobody ends before the note is written.
        note = self._go_back(choice, verdict, witnesses) if group.rank == honest else ""
        where = worker_table.gather(group, note.encode())[honest].decode()
        if group.rank == honest:
            fields = {"of_step": call.stop, "shard": choice.shard, "ranks": list(verdict.culprits)}
            self._context.reporter.event("audit", text=f"{text}; {where}", **fields)
        raise ReplicaError(f"{text}; {where}", list(verdict.culprits), group.rank, weights is None)

    def _go_back(self, choice: AuditChoice, verdict: AuditVerdict, witnesses: Sequence[_Witness]) -> str:
        """Note which states count no more; says to which step the run goes back."""
        attempt, is_exact = self._context.attempt, self._context.config.compute.exact
        standings, copied = [witness.standing for witness in witnesses], [witness.copied for witness in witnesses]
        vouched = audit.back_to(choice, verdict, standings, copied, is_exact)
        kept = [naming.split_name(name)[0] for name in manifest.list_complete(attempt.storage)]
        back = audit.reachable(vouched, kept, is_exact)
        states = void.read(attempt.storage).and_after(back, [*attempt.earlier, attempt.name])
        void.write(attempt.storage, states)
        if back > vouched:
            return f"the run goes back to step {back}, which is the oldest that is kept; nobody vouches for it"
        return f"the run goes back to step {back}" if back else "the run begins again"

    def _again(self, shard: int, start: int) -> tuple[bytes, ...]:
        plan, pipeline = self._context.plan, self._context.program.pipeline
        call = pipeline.alone(shard, start)
        count = None if plan.is_even else int(call.counts[0])
        assert self._step.audit is not None
        leaves = [leaf[0] for leaf in call.leaves]
        return tuple(map(_hash, self._step.audit.again(leaves, call.seeds[0], count, plan.global_batch_size)))

    def _witness(self, shard: int, start: int) -> _Witness:
        context = self._context
        weights = context.program.digest(with_optimizer=context.config.compute.exact).value()
        replicas, again = context.saving.replicas, self._again(shard, start)
        copied = None if replicas is None else replicas.agreed
        return _Witness(again, weights, copied, self._standing, worker_table.whereabouts())


def sentence(step: int, choice: AuditChoice, verdict: AuditVerdict, about: Sequence[str]) -> str:
    """What a verdict says, for people.

    Args:
        about: host and device of each rank.
    """
    ranks = " and ".join(f"rank {rank} ({about[rank]})" for rank in verdict.culprits)
    where = f"step {step}, shard {choice.shard}"
    if verdict.has_other_weights and verdict.culprits:
        return f"{where}: the weights of {ranks} {verdict.why}"
    if not verdict.culprits:
        pair = f"rank {choice.owner} ({about[choice.owner]}) and rank {choice.auditor} ({about[choice.auditor]})"
        return f"{where}: {pair} have computed other bits, and nobody can say who is right: {verdict.why}"
    return f"{where}: {ranks} computes wrongly: it {verdict.why}"


def _hash(digest: bytes) -> bytes:
    return hashlib.sha256(digest).digest()[:16]
