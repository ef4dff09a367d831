"""Transfers the state when ranks meet again: the most advanced rank sends it to the ranks that are behind."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from raytf.checkpoint.step_rows import StepRows
from raytf.checkpoint.training_state import TrainingState
from raytf.distributed.group import Ranks
from raytf.distributed.membership.member import transfer
from raytf.training.session import BatchEnd, EpochEnd
from raytf.training.user.callbacks import BatchHooks
from raytf.training.user.failover_callbacks import CallbackState


class RegroupError(Exception):
    """The ranks must meet again, because one is lost or waits to join. The state is that of a complete step."""


@dataclass(frozen=True)
class HeldState:
    """A rank's state in a run, except the values of its variables.

    Attributes:
        progress: the run's progress.
        rows: rows of the step log that are not on storage yet.
        identity: the run's identity.
        ended, ending: as in `raytf.training.session.RankSession`.
        batches: the properties of the callbacks' batch hooks.
        callbacks: the callbacks' state that all ranks know.
        is_saving: whether a save is in progress.
        batch_end: the batch after which `on_train_batch_end` has not run yet.
    """

    progress: TrainingState
    rows: StepRows
    identity: Mapping[str, str]
    ended: int
    ending: EpochEnd | None
    batches: BatchHooks
    callbacks: CallbackState | None
    is_saving: bool
    batch_end: BatchEnd | None = None


def room_for(named: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """Return memory for the state that this rank will receive, with every page already faulted in.

    The other ranks wait during the transfer, and writing to memory takes several times as long if its pages are not
    faulted in yet.

    Args:
        named: the variables of the state, by name; small ones get no memory.
    """
    spaces = {name: np.empty(*_kind(variable)) for name, variable in named.items()}  # no page is faulted in yet
    return {name: _aligned(space) for name, space in spaces.items() if space.nbytes >= _LARGE_BYTES}


def hand_over(
    group: Ranks,
    steps: Sequence[int],
    held: HeldState | None,
    named: Mapping[str, Any],
    room: Mapping[str, np.ndarray] | None = None,
) -> tuple[HeldState, bool]:
    """Send the state of the most advanced rank (the lowest of several) to the ranks behind it; all ranks must call it.

    Args:
        group: all ranks.
        steps: the last step that each rank completed, by rank; -1 for a rank without a state.
        held: this rank's state; None if it has none.
        named: the variables of the state, by name.
        room: memory for the state, from `room_for`; the variables own it from now on.

    Returns:
        The state, and whether this rank received its variables.
    """
    giver, givers, takers = transfer(steps)
    shared: HeldState = pickle.loads(group.share(pickle.dumps(held) if group.rank == giver else b"", giver))
    if not takers:
        return shared, False
    if group.rank in givers:
        group.hand([_values(variable) for variable in named.values()], givers, takers)
        return shared, False
    room = room or {}
    mine = [room[name] if name in room else np.empty(*_kind(variable)) for name, variable in named.items()]
    for (name, variable), value in zip(named.items(), group.hand(mine, givers, takers), strict=True):
        variable.assign(_as_tensor(value) if value is room.get(name) else value)
    return shared, True


#: The smallest variable that gets memory, the size of a page, and the alignment that TensorFlow requires.
_LARGE_BYTES, _PAGE_BYTES, _ALIGNED_BYTES = 1 << 16, 4096, 64


def _kind(variable: Any) -> tuple[tuple[int, ...], Any]:
    return tuple(variable.shape), tf.as_dtype(variable.dtype).as_numpy_dtype


def _aligned(like: np.ndarray) -> np.ndarray:
    space = np.empty(like.nbytes + _ALIGNED_BYTES, np.uint8)
    space = space[-space.ctypes.data % _ALIGNED_BYTES :][: like.nbytes]
    space[::_PAGE_BYTES] = 0
    return space.view(like.dtype).reshape(like.shape)


def _as_tensor(values: np.ndarray) -> Any:
    """Return a tensor that shares the memory of an array, or the array if TensorFlow cannot share its type."""
    try:
        return tf.experimental.dlpack.from_dlpack(values.__dlpack__())
    except (BufferError, RuntimeError, TypeError, tf.errors.OpError):
        return values


def _values(variable: Any) -> np.ndarray:
    value = variable.value if hasattr(variable, "value") else variable
    # The tensor that `read_value` returns shares the variable's memory; `numpy` would copy it.
    return np.asarray(value.read_value() if hasattr(value, "read_value") else value)
