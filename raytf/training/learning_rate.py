"""Learning-rate scaling and warm-up: what the model's own rate is multiplied by at a step.

A function of the configuration and the step alone. In Horovod the global batch grows with the number of workers, and
the rate with it; here the global batch is a setting, so the rate follows that, and no number of workers appears in it.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass

import keras
import tensorflow as tf

from raytf import _keras
from raytf.config.sections import RateSection
from raytf.data.plan import StepPlan


class LearningRate:
    """Reads an optimizer's rate and applies a law to it.

    A constant rate is scaled once, here, so that callbacks (ReduceLROnPlateau, LearningRateScheduler) see and set the
    scaled one; the warm-up is a share of whatever they have set. A schedule stays as it is, and what it says is
    multiplied. The step is that of the optimizer, which every checkpoint holds, so a resumed run has the same rates.

    Args:
        optimizer: built, and not restored yet.
        law: None leaves the rate alone.
    """

    def __init__(self, optimizer: keras.optimizers.Optimizer, law: RateLaw | None):
        self._optimizer, self._law = optimizer, law
        #: Of a LossScaleOptimizer: the one that has the rate.
        self._inner = getattr(optimizer, "inner_optimizer", optimizer)
        own = _keras.given_rate(self._inner)
        self._is_constant = isinstance(own, keras.Variable)
        if law is not None and self._is_constant:
            own.assign(own * law.factor)

    def of_copy(self, optimizer: keras.optimizers.Optimizer) -> LearningRate:
        """The same law for a copy of the optimizer, made of it as it is now: a constant rate is not scaled again."""
        other = copy.copy(self)
        other._optimizer, other._inner = optimizer, getattr(optimizer, "inner_optimizer", optimizer)
        return other

    def value(self) -> tf.Tensor:
        """The rate of the step that comes next, float32."""
        rate = tf.cast(tf.convert_to_tensor(self._optimizer.learning_rate), tf.float32)
        if self._law is None:
            return rate
        if not self._is_constant:
            rate *= self._law.factor
        if not self._law.warmup_steps:
            return rate
        step, last = tf.convert_to_tensor(self._inner.iterations) + 1, self._law.warmup_steps
        begin = self._law.begin
        share = begin + (1 - begin) * tf.cast(step, tf.float32) / float(last)
        return rate * tf.where(step >= last, 1.0, share)

    @contextlib.contextmanager
    def applied(self, rate: tf.Tensor) -> Iterator[None]:
        """Have the optimizer use this rate in what is traced meanwhile; outside of that it is its own again."""
        if self._law is None:
            yield
            return
        with _keras.with_rate(self._inner, rate):
            yield


@dataclass(frozen=True)
class RateLaw:
    """A scale, and the steps in which it is reached.

    Attributes:
        factor: of the model's own rate, once the warm-up is over.
        warmup_steps: steps of the warm-up; 0 has none.
    """

    factor: float
    warmup_steps: int

    @property
    def begin(self) -> float:
        """Share of the full rate from which the warm-up rises: the model's own rate where that is scaled up, else 0."""
        return min(1.0, 1 / self.factor) if self.factor > 1 else 0.0

    def share(self, step: int) -> float:
        """Share of the full rate, `factor` times the model's own, at a step counted from 0; 1 after the warm-up."""
        if step + 1 >= self.warmup_steps:
            return 1.0
        return self.begin + (1 - self.begin) * (step + 1) / self.warmup_steps


def law(section: RateSection, global_batch_size: int, steps_per_epoch: int) -> RateLaw | None:
    """What the flags ask for.

    Returns:
        None where that is nothing.
    """
    ratio = global_batch_size / section.base_batch_size
    factor = {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[section.scale_learning_rate]
    steps = round(section.warmup_epochs * steps_per_epoch)
    return RateLaw(factor, steps) if factor != 1 or steps > 0 else None


def of_model(section: RateSection, model: keras.Model, plan: StepPlan) -> LearningRate:
    """The rate of a model's optimizer as a run's flags change it; a checkpoint, which has its own, comes later."""
    return LearningRate(model.optimizer, law(section, plan.global_batch_size, plan.steps_per_epoch))
