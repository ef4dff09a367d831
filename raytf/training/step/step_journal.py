"""The results of a call's steps. In a call that fails, the steps before the failure have changed the weights."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

#: Columns of a step's row before its digests: the loss, the learning rate, whether all gradients were finite, and their
#: norm.
_COLUMNS = 4


class StepOutcome(NamedTuple):
    """The result of a call.

    Attributes:
        losses, learning_rates: [K] of each step.
        finite: [K] whether the gradients of each step were finite.
        flags: [F] summed over workers.
        gradients: the reduced gradients of the last step; empty if they are not kept.
        digests: [K, B] uint8 of each step, as `raytf.distributed.step_digest` describes; B is 0 where there are none.
        norms: [K] global norms of the gradients, before they are clipped; NaN where they are not known.
    """

    losses: np.ndarray
    learning_rates: np.ndarray
    finite: np.ndarray
    flags: np.ndarray
    gradients: list[tf.Tensor]
    digests: np.ndarray
    norms: np.ndarray


class StepRow(NamedTuple):
    """The numbers that a step records in its graph.

    Attributes:
        loss: float32.
        finite: bool, whether its gradients were.
        norm: float32, of all its gradients.
        digests: [n] float32 whose bits are the step's digests.
    """

    loss: tf.Tensor
    finite: tf.Tensor
    norm: tf.Tensor
    digests: tf.Tensor


def row_of(step: StepRow, rate: tf.Tensor) -> tf.Tensor:
    """Return a step's row, float32; to be traced.

    Args:
        rate: the learning rate of the step.
    """
    return tf.concat([tf.stack([step.loss, rate, tf.cast(step.finite, tf.float32), step.norm]), step.digests], 0)


def outcome_of(rows: np.ndarray, flags: np.ndarray, gradients: list[tf.Tensor], digest_bytes: int) -> StepOutcome:
    """Return the outcome of steps that have these rows, [K, n]."""
    losses, rates, finite, norms = rows[:, :_COLUMNS].T
    digests = np.ascontiguousarray(rows[:, _COLUMNS:]).view(np.uint8)[:, :digest_bytes]
    return StepOutcome(losses, rates, finite > 0, flags, gradients, digests, norms)


class StepJournal:
    """The rows of a call's steps, which its graph keeps in a variable.

    Args:
        width: columns of a row.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        # The last column says whether the step was made.
        self._rows = tf.Variable(tf.zeros([0, width + 1]), shape=[None, width + 1], trainable=False)

    def begin(self, steps: int) -> None:
        """Begin a call of this many steps."""
        self._rows.assign(tf.zeros([steps, self._width + 1]))

    def note(self, k: tf.Tensor, row: tf.Tensor) -> None:
        """Note that step k of the call is made; to be traced."""
        self._rows.scatter_nd_update([[k]], [tf.concat([row, [1.0]], 0)])

    def rows(self) -> np.ndarray:
        """Return the rows of the steps that were made, in order."""
        rows = self._rows.numpy()
        return rows[rows[:, -1] > 0, :-1]


def width_of(digest_bytes: int) -> int:
    """Return the number of columns of a step's row."""
    return _COLUMNS + -(-digest_bytes // 4)
