"""Audits: another rank recomputes a shard, and if the results differ, all ranks find out who computed wrongly.

This module only decides. Seed, step and spans determine shard and rank, so all ranks know them without a message.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raytf.distributed.step_agreement import ReplicaVerdict


class AuditChoice(NamedTuple):
    """The audit of a step: the shard, the rank that owns it, and the rank that recomputes it."""

    shard: int
    owner: int
    auditor: int


@dataclass(frozen=True)
class AuditVerdict:
    """The ranks that computed wrongly.

    Attributes:
        culprits: their ranks; empty if they cannot be determined.
        why: the reason, for people.
        has_other_weights: whether their weights are wrong, and not their computation.
        is_proven: whether they computed wrongly from correct weights and records.
    """

    culprits: tuple[int, ...]
    why: str
    has_other_weights: bool = False
    is_proven: bool = False


@dataclass
class Standing:
    """The step at which a process began to train (None before that), and the last step that an audit confirmed."""

    joined: int | None = None
    vouched: int = 0

    def joins(self, step: int, known: Sequence[int] | None = None) -> bool:
        """Record that this process begins to train with other ranks. Return whether it has not trained before.

        Args:
            known: `joined` and `vouched` of earlier processes on its node, if known.
        """
        if self.joined is not None:
            return False
        joined, vouched = (step, step) if known is None else known
        self.joined, self.vouched = min(step, joined), min(step, vouched)
        return True


def is_due(step: int, every: int) -> bool:
    """Return whether a step, counted from 1, is audited."""
    return every > 0 and step % every == 0


def why_none(machines: Sequence[str], is_on_gpu: bool) -> str:
    """Return why a run that is not exact cannot be audited, given the machine of each rank; empty if it can."""
    if is_on_gpu:
        return "GPUs compute the same bits twice only with --exact"
    kinds = sorted(set(machines))
    return f"healthy machines of these kinds may compute different bits: {'; '.join(kinds)}" if len(kinds) > 1 else ""


def choose(seed: int, step: int, spans: Sequence[range]) -> AuditChoice:
    """Choose a random shard of a step, and another rank to recompute it; `spans` has the shards of each rank."""
    shards = sum(map(len, spans))
    drawn = int.from_bytes(hashlib.sha256(f"audit {seed} {step}".encode()).digest()[:16])
    shard = drawn % shards
    owner = next(rank for rank, span in enumerate(spans) if shard in span)
    return AuditChoice(shard, owner, (owner + 1 + drawn // shards % (len(spans) - 1)) % len(spans))


def of_weights(verdict: ReplicaVerdict) -> AuditVerdict:
    """Return which ranks have wrong weights, given that not all weights are equal."""
    if verdict.donor is None:
        return AuditVerdict((), "their weights differ", True)
    return AuditVerdict(verdict.apart, "differ from those of the other workers", True)


def of_records(choice: AuditChoice, trained: tuple[bytes, bytes], again: Sequence[bytes]) -> AuditVerdict | None:
    """Return which ranks had wrong records of the shard; None if both ranks had the same records.

    Args:
        choice: the audit.
        trained: hashes of the records on which owner and auditor trained.
        again: by rank, the hash of the records that it reads now.
    """
    if trained[0] == trained[1]:
        return None
    (truth, count), *_ = Counter(again).most_common()
    parties = {rank for rank, had in zip((choice.owner, choice.auditor), trained, strict=True) if had != truth}
    wrong = sorted(parties | {rank for rank, reads in enumerate(again) if reads != truth})
    if 2 * count <= len(again) or 2 * len(wrong) > len(again):
        return AuditVerdict((), "the records of the shard change each time that they are read")
    return AuditVerdict(tuple(wrong), "had other records than the other ranks read")


def judge(
    choice: AuditChoice,
    reported: tuple[bytes, bytes],
    again: Sequence[Sequence[bytes]],
    nodes: Sequence[str] | None = None,
) -> AuditVerdict:
    """Decide which ranks computed a shard wrongly, after all ranks have computed it again, several times each.

    Ranks vote. With several nodes, nodes vote instead, because all ranks of a node may make the same mistake.

    Args:
        choice: the audit.
        reported: digests of the owner and of the auditor, which differ.
        again: by rank, the digest of each repetition, from the same weights and records.
        nodes: each rank's node; by default each has its own.
    """
    shaky = tuple(rank for rank, digests in enumerate(again) if len(set(digests)) > 1)
    if shaky:
        is_few = 2 * len(shaky) <= len(again)
        why = "does not compute the same bits twice" if is_few else "most ranks do not compute the same bits twice"
        return AuditVerdict(shaky if is_few else (), why, is_proven=is_few)
    names = [str(rank) for rank in range(len(again))] if nodes is None or len(set(nodes)) == 1 else nodes
    votes = {(name, digests[0]) for name, digests in zip(names, again, strict=True)}
    (truth, count), *others = Counter(digest for _, digest in votes).most_common()
    if 2 * count <= len(votes):
        return AuditVerdict((), "each rank repeats its own bits, and they differ between ranks")
    if others:
        apart = tuple(rank for rank, digests in enumerate(again) if digests[0] != truth)
        why = f"computes different bits than the other {len(again) - len(apart)} ranks"
        return AuditVerdict(apart, why, is_proven=True)
    wrong = tuple(
        rank for rank, digest in zip((choice.owner, choice.auditor), reported, strict=True) if digest != truth
    )
    if len(wrong) != 1:  # perhaps the weights or the records have changed
        return AuditVerdict((), "neither rank reported what all ranks compute when they repeat it")
    return AuditVerdict(wrong, "computed different bits than all ranks do when they repeat it", is_proven=True)


def back_to(
    choice: AuditChoice,
    verdict: AuditVerdict,
    standings: Sequence[Standing],
    copied: Sequence[int | None],
    is_exact: bool,
) -> int:
    """Return the latest step whose state can be trusted.

    If weights differ, it is the latest copy with equal weights. If a rank computes wrongly, it is that rank's latest
    audit, or in exact mode the step at which it joined, because exact mode keeps none of its unaudited results. If it
    is unknown who is right, it is the earlier of the latest audits of both.

    Args:
        standings: each rank's standing.
        copied: by rank, the step of its latest copy for which it knows that all weights were equal; None for none.
    """
    known = [step for step in copied if step is not None]
    if verdict.has_other_weights and len(known) == len(copied):
        return min(known)
    parties = verdict.culprits or (choice.owner, choice.auditor)
    if verdict.culprits and is_exact:
        return min(standings[rank].joined or 0 for rank in parties)
    return min(standings[rank].vouched for rank in parties)


def reachable(step: int, kept: Sequence[int], is_exact: bool) -> int:
    """Return the step to roll back to, given the latest step that can be trusted.

    Args:
        kept: steps of the available states. If all of them are later, an exact run starts over, and another run rolls
            back to the oldest.
    """
    early = [each for each in kept if each <= step]
    if early or not kept or is_exact:
        return max(early, default=0)
    return min(kept)
