"""Learning-rate scaling and warm-up: computes the factor of the model's own rate at each step.

The factor depends only on the configuration and the step. In Horovod the global batch and the rate grow with the number
of workers. In raytf the global batch is a setting, so the rate depends on this setting, not on the number of workers.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import keras
import tensorflow as tf

from raytf import _keras
from raytf.config.flags import RateSection
from raytf.data.plan import StepPlan
from raytf.errors import ConfigError


class LearningRate:
    """Reads an optimizer's rate and applies scaling and warm-up to it.

    A constant rate is scaled once, in the constructor, so that callbacks (ReduceLROnPlateau, LearningRateScheduler) see
    and set the scaled rate, which the warm-up multiplies. A schedule is not changed, but its value is multiplied. The
    step is the optimizer's step, which every checkpoint contains, so a resumed run has the same rates.

    Args:
        optimizer: the optimizer, built but not restored yet.
        law: the scaling and warm-up; None leaves the rate unchanged.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, law: RateLaw | None):
        self._optimizer, self._law = optimizer, law
        #: The optimizer that has the rate: the inner one of a LossScaleOptimizer.
        self._inner = getattr(optimizer, "inner_optimizer", optimizer)
        own = _keras.given_rate(self._inner)
        self._is_constant = isinstance(own, keras.Variable)
        if law is not None and self._is_constant:
            own.assign(own * law.factor)

    def of_copy(self, optimizer: keras.optimizers.Optimizer) -> LearningRate:
        """Return the rate of a copy of the optimizer under the same law; a constant rate is not scaled again."""
        other = copy.copy(self)
        other._optimizer, other._inner = optimizer, getattr(optimizer, "inner_optimizer", optimizer)
        return other

    def value(self) -> tf.Tensor:
        """Return the learning rate of the next step, a float32 scalar."""
        rate = tf.cast(tf.convert_to_tensor(_keras.rate_of(self._optimizer)), tf.float32)
        if self._law is None:
            return rate
        if not self._is_constant:
            rate *= self._law.factor
        if not self._law.warmup_steps:
            return rate
        # The optimizer counts updates. With gradient accumulation, there are several batches per update.
        batches = tf.convert_to_tensor(self._inner.iterations) * (self._inner.gradient_accumulation_steps or 1)
        step, last = batches + 1, self._law.warmup_steps
        begin = self._law.begin
        share = begin + (1 - begin) * tf.cast(step, tf.float32) / float(last)
        return rate * tf.where(step >= last, 1.0, share)

    @property
    def is_unchanged(self) -> bool:
        """Return whether the optimizer's own rate is used unchanged."""
        return self._law is None

    def applied(self, rate: tf.Tensor) -> AbstractContextManager[None]:
        """Make the optimizer use this rate in graphs that are traced in this context, and its own rate afterwards."""
        return nullcontext() if self._law is None else _keras.with_rate(self._inner, rate)


@dataclass(frozen=True)
class RateLaw:
    """A scale of the learning rate, and the number of steps until it is reached.

    Attributes:
        factor: factor of the model's own rate after the warm-up.
        warmup_steps: steps of the warm-up; 0 for no warm-up.
    """

    factor: float
    warmup_steps: int

    @property
    def begin(self) -> float:
        """Return the fraction at which the warm-up begins: the model's own rate if it is scaled up, otherwise 0."""
        return min(1.0, 1 / self.factor) if self.factor > 1 else 0.0

    def share(self, step: int) -> float:
        """Return the fraction of the full rate, `factor` times the model's own, at a step from 0."""
        if step + 1 >= self.warmup_steps:
            return 1.0
        return self.begin + (1 - self.begin) * (step + 1) / self.warmup_steps


def law(section: RateSection, global_batch_size: int, steps_per_epoch: int) -> RateLaw | None:
    """Return the scaling and warm-up that the flags request; None if they leave the rate unchanged."""
    ratio = global_batch_size / section.base_batch_size
    factor = {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[section.scale_learning_rate]
    steps = round(section.warmup_epochs * steps_per_epoch)
    return RateLaw(factor, steps) if factor != 1 or steps > 0 else None


def of_model(section: RateSection, model: keras.Model, plan: StepPlan) -> LearningRate:
    """Return the learning rate of a model's optimizer with a run's flags applied. Call this before a checkpoint, which
    contains the scaled rate, is restored.

    Raises:
        ConfigError: the flags change the rate, but the optimizer has several rates.
    """
    wanted = law(section, plan.global_batch_size, plan.epoch_start(1))
    if wanted is not None and not _keras.has_one_rate(model.optimizer):
        raise ConfigError(
            "--scale-learning-rate and --warmup-epochs change a single learning rate, but the model's optimizer has "
            "several. Remove the flags, and pass schedules to its optimizers."
        )
    return LearningRate(model.optimizer, wanted)
