"""Audits: a shard that is computed once more by another rank, and who computed wrongly where the two differ.

Decisions only. Shard and rank are a function of seed, step and spans, so all ranks know them without a message.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raytf.distributed.step_agreement import ReplicaVerdict


class AuditChoice(NamedTuple):
    """The audit of a step: the shard, the rank that owns it, and the rank that computes it once more."""

    shard: int
    owner: int
    auditor: int


@dataclass(frozen=True)
class AuditVerdict:
    """The ranks that computed wrongly.

    Attributes:
        culprits: ranks; none where nobody can say.
        why: for people.
        has_other_weights: it is their weights that are wrong, and not what they compute from them.
        is_proven: they were seen to compute wrongly, from right weights and records.
    """

    culprits: tuple[int, ...]
    why: str
    has_other_weights: bool = False
    is_proven: bool = False


@dataclass
class Standing:
    """The step at which a process began to train (None before that), and the last step at which an audit agreed with
    it."""

    joined: int | None = None
    vouched: int = 0

    def joins(self, step: int, known: Sequence[int] | None = None) -> bool:
        """Note that this process begins to train with other ranks; return whether it has not trained before.

        Args:
            known: what is known of its node from earlier processes: as `joined` and `vouched`.
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
    """Return why a run that is not exact cannot be audited, by the machine of each rank; empty if it can."""
    if is_on_gpu:
        return "GPUs compute the same bits twice with --exact alone"
    kinds = sorted(set(machines))
    return f"right machines of these kinds may compute other bits: {'; '.join(kinds)}" if len(kinds) > 1 else ""


def choose(seed: int, step: int, spans: Sequence[range]) -> AuditChoice:
    """Choose a shard of a step at random, and one of the other ranks to compute it again; `spans` are the shards of
    each rank, of at least two ranks."""
    shards = sum(map(len, spans))
    drawn = int.from_bytes(hashlib.sha256(f"audit {seed} {step}".encode()).digest()[:16])
    shard = drawn % shards
    owner = next(rank for rank, span in enumerate(spans) if shard in span)
    return AuditChoice(shard, owner, (owner + 1 + drawn // shards % (len(spans) - 1)) % len(spans))


def of_weights(verdict: ReplicaVerdict) -> AuditVerdict:
    """Return whose weights are wrong, where they are not all equal."""
    if verdict.donor is None:
        return AuditVerdict((), "their weights differ", True)
    return AuditVerdict(verdict.apart, "are not those of the other workers", True)


def of_records(choice: AuditChoice, trained: tuple[bytes, bytes], again: Sequence[bytes]) -> AuditVerdict | None:
    """Return whose records of the shard were wrong; None where both ranks had the same.

    Args:
        choice: of the audit.
        trained: hashes of the records of owner and auditor.
        again: by rank, the hash of the records as it reads them now.
    """
    if trained[0] == trained[1]:
        return None
    (truth, count), *_ = Counter(again).most_common()
    parties = {rank for rank, had in zip((choice.owner, choice.auditor), trained, strict=True) if had != truth}
    wrong = sorted(parties | {rank for rank, reads in enumerate(again) if reads != truth})
    if 2 * count <= len(again) or 2 * len(wrong) > len(again):
        return AuditVerdict((), "its records are others each time that they are read")
    return AuditVerdict(tuple(wrong), "had other records than the others read")


def judge(
    choice: AuditChoice,
    reported: tuple[bytes, bytes],
    again: Sequence[Sequence[bytes]],
    nodes: Sequence[str] | None = None,
) -> AuditVerdict:
    """Decide which ranks computed a shard wrongly, after all ranks have computed it again, several times each.

    Ranks vote, and where there are several nodes, nodes do: ranks of one may be wrong alike.

    Args:
        choice: of the audit.
        reported: digests of the owner and of the auditor, which differ.
        again: by rank, the digests of each time; from the same weights and records.
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
        return AuditVerdict((), "each computes the same bits again and again, and they differ")
    if others:
        apart = tuple(rank for rank, digests in enumerate(again) if digests[0] != truth)
        why = f"computes other bits than the other {len(again) - len(apart)} ranks"
        return AuditVerdict(apart, why, is_proven=True)
    wrong = tuple(
        rank for rank, digest in zip((choice.owner, choice.auditor), reported, strict=True) if digest != truth
    )
    if len(wrong) != 1:  # perhaps it is the weights or the records that have changed
        return AuditVerdict((), "no rank told what all ranks compute when they do it again")
    return AuditVerdict(wrong, "computed other bits than all ranks do when they compute it again", is_proven=True)


def back_to(
    choice: AuditChoice,
    verdict: AuditVerdict,
    standings: Sequence[Standing],
    copied: Sequence[int | None],
    is_exact: bool,
) -> int:
    """Return the latest step whose state can be trusted.

    Weights that differ were equal in an earlier copy. A rank that computes wrongly was right in its latest audit; exact
    mode takes nothing from it that was not audited. Where nobody can say who is right, both were in their latest one.

    Args:
        standings: each rank's standing.
        copied: by rank, the step of the latest copy of which it knows that all had the same weights; None for none.
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
        kept: steps of the states that there are. An exact run begins again where all of them are later; another one
            goes back to the oldest.
    """
    early = [each for each in kept if each <= step]
    if early or not kept or is_exact:
        return max(early, default=0)
    return min(kept)
