"""Whether steps that were computed again are those that a run has noted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from raytf.distributed import step_digest
from raytf.distributed.step_digest import Difference, DigestKind, DigestLayout
from raytf.runs import digest_log, run_log
from raytf.runs.digest_log import RunDigests
from raytf.storage.storage import Storage


@dataclass(frozen=True)
class NotedSteps:
    """What a run has noted of its steps.

    Attributes:
        digests: of those that have one.
        losses: of all, by step from 1.
    """

    digests: RunDigests
    losses: Mapping[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class StepComparison:
    """What a comparison has found.

    Attributes:
        same: steps whose digests are equal, up to the first that differs.
        unknown: steps of which one side has no digest, or one that cannot be compared.
        differs: the first step that differs; None for none.
        difference: in what.
        why: what cannot be compared, for people; empty where everything could.
        losses: how many of the unknown steps have a loss on both sides.
        farthest: of those, the step whose losses differ most, and both of them; None where all are equal.
    """

    same: int
    unknown: int
    differs: int | None = None
    difference: Difference | None = None
    why: str = ""
    losses: int = 0
    farthest: tuple[int, float, float] | None = None

    @property
    def is_same(self) -> bool:
        """Whether something was compared, and nothing differs."""
        return self.differs is None and self.farthest is None and bool(self.same or self.losses)


def read(run: Storage) -> NotedSteps:
    """What a run has noted.

    Raises:
        DamagedFileError: a segment of its log is none that raytf has written.
        StorageError: storage refuses.
    """
    table = run_log.read_steps(run.uri)
    losses = dict(zip(table["step"].tolist(), table["loss"].tolist(), strict=True))
    return NotedSteps(digest_log.read(run, run_log.STEPS), losses)


def compare(noted: NotedSteps, again: NotedSteps, steps: range) -> StepComparison:
    """Compare the digests of some steps, in order, up to the first that differs; losses where digests cannot be.

    Args:
        noted: by the run.
        again: computed again.
        steps: which to compare.
    """
    same, unknown, why = 0, list[int](), ""
    differs, difference = None, None
    for step in steps:
        before, after = noted.digests.of(step), again.digests.of(step)
        if before is None or after is None:
            unknown.append(step)
            why = why or f"step {step} has no digest"
        elif before[0] != after[0]:
            unknown.append(step)
            why = why or _unlike(before[0], after[0])
        else:
            difference = step_digest.difference(before[0], before[1], after[1])
            if difference is not None:
                differs = step
                break
            same += 1
    both = [step for step in unknown if step in noted.losses and step in again.losses]
    pairs = [(step, noted.losses[step], again.losses[step]) for step in both]
    farthest = max(pairs, key=_apart, default=None)
    if farthest is not None and not _apart(farthest):
        farthest = None
    return StepComparison(same, len(unknown), differs, difference, why, len(both), farthest)


def _apart(pair: tuple[int, float, float]) -> float:
    """How far two losses of a step are apart, relative to the larger one."""
    _, one, other = pair
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other))


def _unlike(noted: DigestLayout, again: DigestLayout) -> str:
    """Why digests of two layouts cannot be compared."""
    if noted.kind != again.kind and DigestKind.DEVICE not in (noted.kind, again.kind):
        return "an older raytf made the digests of one of the two in another way"
    if noted.kind != again.kind:
        run, here = ("on GPUs", "on CPUs") if noted.kind == DigestKind.DEVICE else ("on CPUs", "on GPUs")
        return f"the run computed {run} and this machine computes {here}, whose last bits differ"
    if noted.shards != again.shards:
        return f"the run has {noted.shards} logical shards, and the program asks for {again.shards}"
    added, gone = set(again.tensors) - set(noted.tensors), set(noted.tensors) - set(again.tensors)
    named = ", ".join(sorted(added or gone)[:3]) or "their order"
    return f"the model has other weights than that of the run: {named}"
