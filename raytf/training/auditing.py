"""Audits of a run: decides which steps are audited, and handles two workers that compute different bits."""

from __future__ import annotations

import contextlib
import hashlib
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import numpy as np
import tensorflow as tf

from raytf.audit import shard_audit
from raytf.audit.shard_audit import AuditChoice, AuditVerdict, Standing
from raytf.checkpoint import invalidated_states, manifest, naming
from raytf.config.flags import ComputeSection
from raytf.data.pipeline import CallBatch
from raytf.data.plan import assign
from raytf.data.sources.batches import LiveBatches
from raytf.distributed import step_agreement, worker_table
from raytf.errors import ReplicaError, StorageError, WorkerLostError
from raytf.runs.lease import check_owner
from raytf.training import exact
from raytf.training.session import RankSession
from raytf.training.step.step import TrainStep

#: Default number of steps between two audits of an exact run; they take less than 1 % of the time.
EVERY = 256


def steps_between(compute: ComputeSection) -> int:
    """Return the number of steps between two audits; 0 for none.

    Without exact mode, two machines may compute different bits, so audits run only if the user asks for them.
    """
    return (EVERY if compute.exact else 0) if compute.audit_every is None else compute.audit_every


@dataclass(frozen=True)
class _Witness:
    """The evidence of a rank about a step.

    Attributes:
        again: hashes of the digests that the rank computes now, one for each repetition.
        records: hash of the shard's records, as the rank reads them now.
        trained: hash of the shard's records that the rank trained with; only the owner and the auditor have some.
        weights: hash of the rank's weights.
        copied: step of the latest copy for which all ranks had equal weights; None if there is none.
        standing: the standing of the rank's process.
        node: Ray's id of the rank's node.
        about: the rank's host and device, as text.
    """

    again: tuple[bytes, ...]
    records: bytes
    trained: bytes
    weights: int
    copied: int | None
    standing: Standing
    node: str
    about: str


class Audits:
    """The audits of one rank, as long as the group does not change.

    Args:
        session: the rank's session.
        step: the training step.
        every: steps between two audits; 0 for none.
        standing: the standing of this process; kept up to date.
        node: Ray's id of this process's node.
    """

    def __init__(self, session: RankSession, step: TrainStep, every: int, standing: Standing, node: str):
        self._session, self._step, self._standing, self._node = session, step, standing, node
        group, plan, source = session.group, session.plan, session.sources.train
        self._can_be = step.audit is not None and not isinstance(source, LiveBatches)
        self._every = every if self._can_be and group.world_size > 1 else 0
        self._spans = [assign(plan.shards, group.world_size)[rank] for rank in range(group.world_size)]

    def compare_machines(self) -> None:
        """Disable audits if the ranks' machines may compute different bits without a fault; every rank must call it."""
        session, group = self._session, self._session.group
        if not self._can_be and group.world_size > 1 and session.config.compute.audit_every and session.is_first_rank:
            session.reporter.say(
                "--audit-every: no step is audited, because audits do not support float sums, --overlap, --no-digests, "
                "workers with several devices, losses divided by data, or batches that a program makes"
            )
        if not self._every or session.config.compute.exact:
            return
        own = f"{exact.machine()}, {tf.config.threading.get_intra_op_parallelism_threads()} threads"
        machines = [each.decode() for each in worker_table.gather(group, own.encode())]
        why = shard_audit.why_none(machines, self._step.is_on_gpu)
        if why and session.is_first_rank:
            session.reporter.say(f"--audit-every: no step is audited, because {why}")
        self._every = 0 if why else self._every

    def call_end(self, start: int, stop: int) -> int:
        """Return the end of a call, at `stop` or earlier, so that an audited step gets its own call."""
        if not self._every:
            return stop
        due = (start // self._every + 1) * self._every
        return min(stop, due if start == due - 1 else due - 1)

    def choice(self, start: int) -> AuditChoice | None:
        """Return the audit in a call that begins at a step; None if there is none."""
        plan = self._session.plan
        if not shard_audit.is_due(start + 1, self._every) or not plan.is_full(plan.locate(start)[1]):
            return None
        return shard_audit.choose(self._session.config.batch.seed, start + 1, self._spans)

    def beside(self, start: int) -> int | None:
        """Return the other rank's shard that this rank audits in the call at a step; None if it audits none."""
        choice = self.choice(start)
        return choice.shard if choice is not None and choice.auditor == self._session.group.rank else None

    def begin(self) -> None:
        """Record that this process trains with these ranks from now on."""
        known = self._session.place.standings.get(self._node)
        if self._standing.joins(self._session.state.step, known) and self._every:
            self._tell()

    def agreed(self, call: CallBatch) -> None:
        """Record that a call is complete, and that its audit, if any, found no difference."""
        choice = self.choice(call.start)
        if choice is not None and self._session.group.rank in (choice.owner, choice.auditor):
            self._standing.vouched = call.stop
            self._tell()

    def _tell(self) -> None:
        self._session.reporter.stand(self._standing.joined or 0, self._standing.vouched)

    def settle(self, call: CallBatch, digests: tuple[bytes, bytes]) -> NoReturn:
        """Find the rank that computed a step wrongly, and roll the run back to a state that does not depend on it.

        Every rank must call it. The step has not changed the model.

        Args:
            call: the call with the step.
            digests: the digests of the shard's owner and of the auditor.

        Raises:
            ReplicaError: always, unless a rank is lost before the verdict.
        """
        choice, group = self.choice(call.start), self._session.group
        assert choice is not None
        own = self._witness(choice, call)
        witnesses: list[_Witness] = [pickle.loads(each) for each in worker_table.gather(group, pickle.dumps(own))]
        verdict = _verdict(choice, (_hash(digests[0]), _hash(digests[1])), witnesses)
        text = sentence(call.stop, choice, verdict, [witness.about for witness in witnesses])
        honest = next((rank for rank in range(group.world_size) if rank not in verdict.culprits), 0)
        where = self._go_back(choice, verdict, witnesses) if group.rank == honest else ""
        # No rank exits before all of this is recorded. A rank that is lost now does not change the verdict.
        with contextlib.suppress(tf.errors.OpError, WorkerLostError):
            where = worker_table.gather(group, where.encode())[honest].decode()
        text = f"{text}; {where or 'the run goes back'}"
        if group.rank == honest:
            fields = {"of_step": call.stop, "shard": choice.shard, "ranks": list(verdict.culprits)}
            self._session.reporter.event("audit", text=text, **fields)
        nodes = [witnesses[rank].node for rank in verdict.culprits]
        raise ReplicaError(text, list(verdict.culprits), group.rank, verdict.is_proven, nodes)

    def _go_back(self, choice: AuditChoice, verdict: AuditVerdict, witnesses: Sequence[_Witness]) -> str:
        """Mark states as invalid, delete them from storage, and return a text with the step to roll back to."""
        session = self._session
        storage, place, is_exact = session.storage, session.place, session.config.compute.exact
        standings, copied = [witness.standing for witness in witnesses], [witness.copied for witness in witnesses]
        vouched = shard_audit.back_to(choice, verdict, standings, copied, is_exact)
        try:
            check_owner(storage, session.job.lease)
            kept = [naming.split_name(name)[0] for name in manifest.list_complete(storage)]
        except StorageError:  # the next group reads the checkpoints
            kept = [vouched]
        if verdict.has_other_weights:
            kept.append(vouched)  # the copy in memory
        back = shard_audit.reachable(vouched, kept, is_exact)
        attempts = [*place.earlier, place.attempt]
        # A copy in memory counts, too, unless it is later than the step that ranks vouch for.
        states = place.void.and_after(max(vouched, back), attempts)
        session.reporter.go_back(max(vouched, back), attempts)
        with contextlib.suppress(StorageError):
            invalidated_states.write(storage, states)
            invalidated_states.sweep(storage, states)
        if back > vouched:
            return f"the run goes back to step {back}, the oldest that is kept, although no rank vouches for it"
        return f"the run goes back to step {vouched} or before" if back else "the run begins again"

    def _witness(self, choice: AuditChoice, call: CallBatch) -> _Witness:
        session, rank = self._session, self._session.group.rank
        plan, pipeline, replicas = session.plan, session.pipeline, session.saving.replicas
        assert self._step.audit is not None
        alone = pipeline.alone(choice.shard, call.start)
        count, leaves = None if plan.is_even else int(alone.counts[0]), [leaf[0] for leaf in alone.leaves]
        again = self._step.audit.again(leaves, alone.seeds[0], count, plan.global_batch_size)
        place = len(pipeline.shards) if rank == choice.auditor else choice.shard - pipeline.shards.start
        is_party = rank in (choice.owner, choice.auditor)
        trained = [np.asarray(leaf)[0, place] for leaf in call.leaves] if is_party else []
        return _Witness(
            tuple(map(_hash, again)),
            _hash(b"".join(np.asarray(leaf)[0].tobytes() for leaf in leaves)),
            _hash(b"".join(leaf.tobytes() for leaf in trained)),
            session.digest(with_optimizer=session.config.compute.exact).value(),
            None if replicas is None else replicas.agreed,
            self._standing,
            self._node,
            worker_table.whereabouts(),
        )


def _verdict(choice: AuditChoice, digests: tuple[bytes, bytes], witnesses: Sequence[_Witness]) -> AuditVerdict:
    weights = step_agreement.judge([witness.weights for witness in witnesses])
    if weights is not None:
        return shard_audit.of_weights(weights)
    trained = witnesses[choice.owner].trained, witnesses[choice.auditor].trained
    records = shard_audit.of_records(choice, trained, [witness.records for witness in witnesses])
    if records is not None:
        return records
    nodes = [witness.node for witness in witnesses]
    return shard_audit.judge(choice, digests, [witness.again for witness in witnesses], nodes)


def sentence(step: int, choice: AuditChoice, verdict: AuditVerdict, about: Sequence[str]) -> str:
    """Describe a verdict for people.

    Args:
        about: the host and device of each rank.
    """
    ranks = " and ".join(f"rank {rank} ({about[rank]})" for rank in verdict.culprits)
    where = f"step {step}, shard {choice.shard}"
    if verdict.has_other_weights and verdict.culprits:
        return f"{where}: the weights of {ranks} {verdict.why}"
    if not verdict.culprits:
        pair = f"rank {choice.owner} ({about[choice.owner]}) and rank {choice.auditor} ({about[choice.auditor]})"
        return f"{where}: {pair} computed different bits, and it is unknown who is right: {verdict.why}"
    if not verdict.is_proven:  # its records were wrong
        return f"{where}: {ranks} {verdict.why}"
    return f"{where}: {ranks} computes wrongly: it {verdict.why}"


def _hash(digest: bytes) -> bytes:
    return hashlib.sha256(digest).digest()[:16]
