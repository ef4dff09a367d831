"""What comes of a call's steps, also of one that fails: those before the step that failed have changed the weights."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import tensorflow as tf

#: Columns: the loss, the learning rate, whether all gradients were finite, and whether the step was made.
_COLUMNS = 4


class StepOutcome(NamedTuple):
    """The result of a call.

    Attributes:
        losses, learning_rates: [K] of each step.
        finite: [K] whether the gradients of each step were finite.
        flags: [F] summed over workers.
        gradients: the reduced gradients of the last step; empty if they are not kept.
    """

    losses: np.ndarray
    learning_rates: np.ndarray
    finite: np.ndarray
    flags: np.ndarray
    gradients: list[tf.Tensor]


class StepJournal:
    """The outcomes of a call's steps, which its graph keeps in a variable."""

    def __init__(self) -> None:
        self._rows = tf.Variable(tf.zeros([0, _COLUMNS]), shape=[None, _COLUMNS], trainable=False)

    def begin(self, steps: int) -> None:
        """A call of so many steps begins."""
        self._rows.assign(tf.zeros([steps, _COLUMNS]))

    def note(self, k: tf.Tensor, loss: tf.Tensor, rate: tf.Tensor, finite: tf.Tensor) -> None:
        """Step k of the call is made; to be traced."""
        self._rows.scatter_nd_update([[k]], [[loss, rate, tf.cast(finite, tf.float32), 1.0]])

    def outcome(self, flags: int) -> StepOutcome:
        """The outcome of the steps that were made, in order; with so many flags, which are not known."""
        rows = self._rows.numpy()
        losses, rates, finite, _ = rows[rows[:, -1] > 0].T
        return StepOutcome(losses, rates, finite > 0, np.zeros(flags, np.float32), [])
