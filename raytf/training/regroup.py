"""State transfer when ranks meet again: ranks that are behind get the state of the one that is furthest."""

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
    """The ranks have to meet again: one is lost, or a rank waits to join. The state is that of a whole step."""


@dataclass(frozen=True)
class HeldState:
    """The progress of a rank in a run, beside the values of its variables.

    Attributes:
        progress: the run's progress.
        rows: rows of the log of steps that are not on storage.
        identity: the run's identity.
        ended, ending: as in `raytf.training.session.RankSession`.
        batches: the callbacks' hooks of batches.
        callbacks: the state of the callbacks that all ranks know.
        is_saving: whether a save is under way.
        batch_end: the batch whose end callbacks have not seen yet.
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

    The other ranks wait during the transfer, and writing to memory takes several times as long while the system still
    has to provide its pages.

    Args:
        named: the variables of the state, by name; small ones need no room.
    """
    spaces = {name: np.empty(*_kind(variable)) for name, variable in named.items()}  # takes no memory yet
    return {name: _aligned(space) for name, space in spaces.items() if space.nbytes >= _LARGE_BYTES}


def hand_over(
    group: Ranks,
    steps: Sequence[int],
    held: HeldState | None,
    named: Mapping[str, Any],
    room: Mapping[str, np.ndarray] | None = None,
) -> tuple[HeldState, bool]:
    """Send the state of the rank that is furthest (the lowest such rank) to those behind it; every rank must call it.

    Args:
        group: all ranks.
        steps: the last step that each rank has finished, by rank; -1 for one without a state.
        held: this rank's state; None for a rank without one.
        named: the variables of the state, by name.
        room: for the state, from `room_for`; it belongs to the variables from now on.

    Returns:
        The state, and whether this rank had to take it.
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


#: The least size of what gets room; pages are of 4096 bytes, TensorFlow wants this alignment.
_LARGE_BYTES, _PAGE_BYTES, _ALIGNED_BYTES = 1 << 16, 4096, 64


def _kind(variable: Any) -> tuple[tuple[int, ...], Any]:
    return tuple(variable.shape), tf.as_dtype(variable.dtype).as_numpy_dtype


def _aligned(like: np.ndarray) -> np.ndarray:
    space = np.empty(like.nbytes + _ALIGNED_BYTES, np.uint8)
    space = space[-space.ctypes.data % _ALIGNED_BYTES :][: like.nbytes]
    space[::_PAGE_BYTES] = 0
    return space.view(like.dtype).reshape(like.shape)


def _as_tensor(values: np.ndarray) -> Any:
    """Return a tensor in the memory of an array, or the array where TensorFlow does not take its type that way."""
    try:
        return tf.experimental.dlpack.from_dlpack(values.__dlpack__())
    except (BufferError, RuntimeError, TypeError, tf.errors.OpError):
        return values


def _values(variable: Any) -> np.ndarray:
    value = variable.value if hasattr(variable, "value") else variable
    # The tensor that is read has the variable's memory, of which `numpy` would make a copy.
    return np.asarray(value.read_value() if hasattr(value, "read_value") else value)
