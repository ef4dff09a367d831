"""Whether steps that were computed again are those that a run has noted."""

from __future__ import annotations

from dataclasses import dataclass

from raytf.distributed import step_digest
from raytf.distributed.step_digest import Difference, DigestLayout
from raytf.runs.digest_log import RunDigests


@dataclass(frozen=True)
class StepComparison:
    """What a comparison has found.

    Attributes:
        same: steps whose digests are equal, up to the first that differs.
        unknown: steps of which one side has no digest, or one that cannot be compared.
        differs: the first step that differs; None for none.
        difference: in what.
        why: what cannot be compared, for people; empty where everything could.
    """

    same: int
    unknown: int
    differs: int | None = None
    difference: Difference | None = None
    why: str = ""


def compare(noted: RunDigests, again: RunDigests, steps: range) -> StepComparison:
    """Compare the digests of some steps, in order, up to the first that differs.

    Args:
        noted: by the run.
        again: computed again.
        steps: which to compare.
    """
    same, unknown, why = 0, 0, ""
    for step in steps:
        before, after = noted.of(step), again.of(step)
        if before is None or after is None:
            unknown += 1
            why = why or f"step {step} has no digest"
        elif before[0] != after[0]:
            unknown += 1
            why = why or _unlike(before[0], after[0])
        else:
            difference = step_digest.difference(before[0], before[1], after[1])
            if difference is not None:
                return StepComparison(same, unknown, step, difference, why)
            same += 1
    return StepComparison(same, unknown, why=why)


def _unlike(noted: DigestLayout, again: DigestLayout) -> str:
    """Why digests of two layouts cannot be compared."""
    if noted.on_device != again.on_device:
        run, here = ("on GPUs", "on CPUs") if noted.on_device else ("on CPUs", "on GPUs")
        return f"the run computed {run} and this machine computes {here}, whose last bits differ"
    if noted.shards != again.shards:
        return f"the run has {noted.shards} logical shards, and the program asks for {again.shards}"
    added, gone = set(again.tensors) - set(noted.tensors), set(noted.tensors) - set(again.tensors)
    named = ", ".join(sorted(added or gone)[:3]) or "their order"
    return f"the model has other weights than that of the run: {named}"
