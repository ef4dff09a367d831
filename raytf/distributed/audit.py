"""Audits: a shard that is computed once more by another rank, and who computed wrongly where the two differ.

Decisions only. Which shard and which rank is a function of seed, step and spans, so all ranks know it without a word.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raytf.distributed.replica_agreement import ReplicaVerdict


class AuditChoice(NamedTuple):
    """What is audited in a step.

    Attributes:
        shard: that is computed twice.
        owner: rank that has it.
        auditor: rank that computes it once more.
    """

    shard: int
    owner: int
    auditor: int


@dataclass(frozen=True)
class AuditVerdict:
    """Who computed wrongly.

    Attributes:
        culprits: ranks; none where nobody can say.
        why: for people.
        has_other_weights: it is their weights that are wrong, and not what they compute from them.
    """

    culprits: tuple[int, ...]
    why: str
    has_other_weights: bool = False


@dataclass
class Standing:
    """From when on this process has trained, and how long it was right for all that is known.

    Attributes:
        joined: step at which it began; None before that.
        vouched: step of the latest audit that has agreed with it; as `joined` where there was none.
    """

    joined: int | None = None
    vouched: int = 0

    def joins(self, step: int) -> None:
        """It begins to train with other ranks."""
        if self.joined is None:
            self.joined = self.vouched = step


def is_due(step: int, every: int) -> bool:
    """Whether a step, counted from 1, is audited."""
    return every > 0 and step % every == 0


def choose(seed: int, step: int, spans: Sequence[range]) -> AuditChoice:
    """A shard at random, and one of the other ranks.

    Args:
        seed: of the run.
        step: counted from 1.
        spans: shards of each rank, of at least two ranks.
    """
    shards = sum(map(len, spans))
    drawn = int.from_bytes(hashlib.sha256(f"audit {seed} {step}".encode()).digest()[:16])
    shard = drawn % shards
    owner = next(rank for rank, span in enumerate(spans) if shard in span)
    return AuditChoice(shard, owner, (owner + 1 + drawn // shards % (len(spans) - 1)) % len(spans))


def of_weights(found: ReplicaVerdict) -> AuditVerdict:
    """Whose weights are wrong, where they are not all equal."""
    if found.donor is None:
        return AuditVerdict((), "their weights differ", True)
    return AuditVerdict(found.apart, "are not those of the other workers", True)


def judge(choice: AuditChoice, told: tuple[bytes, bytes], again: Sequence[Sequence[bytes]]) -> AuditVerdict:
    """Who computed a shard wrongly, after all ranks have computed it again, several times each.

    Args:
        choice: of the audit.
        told: digests of the owner and of the auditor, which differ.
        again: by rank, the digests of each time; from the same weights and records.
    """
    shaky = tuple(rank for rank, digests in enumerate(again) if len(set(digests)) > 1)
    if shaky:
        return AuditVerdict(shaky, "does not compute the same bits twice")
    (truth, count), *others = Counter(digests[0] for digests in again).most_common()
    if 2 * count <= len(again):
        return AuditVerdict((), "every rank computes the same bits again and again, and they differ")
    if others:
        apart = tuple(rank for rank, digests in enumerate(again) if digests[0] != truth)
        return AuditVerdict(apart, f"computes other bits than the other {count} ranks")
    wrong = tuple(rank for rank, digest in zip((choice.owner, choice.auditor), told, strict=True) if digest != truth)
    if len(wrong) != 1:  # neither told what all compute now: perhaps it is the weights or the records that have changed
        return AuditVerdict((), "no rank told what all ranks compute when they do it again")
    return AuditVerdict(wrong, "computed other bits than all ranks do when they compute it again")


def back_to(
    choice: AuditChoice,
    verdict: AuditVerdict,
    standings: Sequence[Standing],
    copied: Sequence[int | None],
    is_exact: bool,
) -> int:
    """The latest step whose state counts.

    Weights that differ were equal in an earlier copy. A rank that computes wrongly was right in its latest audit; exact
    mode takes nothing from it that was not audited. Where nobody can say who is right, both were in their latest one.

    Args:
        standings: of each rank.
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
    """The step to which a run goes back that should go back to one or before it.

    Args:
        kept: steps of the checkpoints that there are. Unless it is exact, a run does not begin again while it has one.
    """
    return step if is_exact or not kept else max(step, min(kept))
