"""Which records of its data a run had in a step, out of the settings that its checkpoints keep."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from raytf.data.order import EpochOrder
from raytf.data.plan import StepPlan

#: What `raytf.training.run_identity.contents` says of arrays alone. Where blocks of other data begin, no run keeps.
_ARRAYS = re.compile(r"\d+ records, CRC-32 ")
_SIZES = ("training records", "--global-batch-size", "--logical-shards", "--seed")


def numbers(identity: Mapping[str, str], step: int, shards: Sequence[int]) -> list[int] | None:
    """Numbers of records, as the data count them from 0.

    Args:
        identity: of the run.
        step: counted from 1.
        shards: of which logical shards, one after another.

    Returns:
        None where the run does not keep what tells it.
    """
    if not _ARRAYS.match(identity.get("contents of the training data", "")):
        return None
    try:
        records, batch, of, seed = (int(identity[key]) for key in _SIZES)
        if min(records, batch, of) < 1:
            return None
        plan = StepPlan(records, batch, of)
        epoch, inside = plan.locate(step - 1)
        order = EpochOrder(plan, None, seed, epoch, 1, identity.get("shuffle") != "off")
        return [int(n) for shard in shards for n in order.of_steps(shard, inside, inside + 1)]
    except (KeyError, ValueError, IndexError):  # an identity that no raytf has written
        return None
