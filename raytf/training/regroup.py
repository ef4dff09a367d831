"""What ranks that meet again give each other: the state of the one that is furthest, for those that are behind."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from raytf.checkpoint.training_state import TrainingState
from raytf.distributed.group import Ranks
from raytf.training.context import BatchEnd
from raytf.training.epoch_end import EpochEnd
from raytf.training.moving_callbacks import CallbackState


class RegroupError(Exception):
    """The ranks have to meet again: one is lost, or somebody waits to join. The state is that of a whole step."""


@dataclass(frozen=True)
class HeldState:
    """Where a rank is in a run, beside the values of its variables.

    Attributes:
        progress: of the run.
        rows: of the log of steps that are not on storage, [n, 4].
        identity: of the run.
        ended, ending: as in `raytf.training.context.Context`.
        is_steering: whether callbacks' hooks of batches may change something.
        callbacks: what all ranks know of the callbacks.
        is_saving: whether a save is under way.
        batch_end: what callbacks have not been told yet.
    """

    progress: TrainingState
    rows: np.ndarray
    identity: Mapping[str, str]
    ended: int
    ending: EpochEnd | None
    is_steering: bool
    callbacks: CallbackState | None
    is_saving: bool
    batch_end: BatchEnd | None = None


def hand_over(
    group: Ranks, steps: Sequence[int], held: HeldState | None, named: Mapping[str, Any]
) -> tuple[HeldState, bool]:
    """Give every rank the state of the lowest one that is furthest; every rank must call it.

    Args:
        group: of all ranks.
        steps: the last step that each rank has finished, by rank; -1 for one without a state.
        held: of this rank; None for one without a state.
        named: the variables of the state, by name.

    Returns:
        The state, and whether this rank had to take it.
    """
    furthest = max(steps)
    giver = list(steps).index(furthest)
    told: HeldState = pickle.loads(group.share(pickle.dumps(held) if group.rank == giver else b"", giver))
    if min(steps) == furthest:
        return told, False
    givers = [rank for rank, step in enumerate(steps) if step == furthest]
    takers = [rank for rank, step in enumerate(steps) if step < furthest]
    arrays = group.hand([_values(v, group.rank in givers) for v in named.values()], givers, takers)
    if group.rank not in takers:
        return told, False
    for variable, value in zip(named.values(), arrays, strict=True):
        variable.assign(value)
    return told, True


def _values(variable: Any, are_wanted: bool) -> np.ndarray:
    if not are_wanted:
        return np.empty(variable.shape, tf.as_dtype(variable.dtype).as_numpy_dtype)
    value = variable.value if hasattr(variable, "value") else variable
    # The tensor that is read has the variable's memory, of which `numpy` would make a copy.
    return np.asarray(value.read_value() if hasattr(value, "read_value") else value)
