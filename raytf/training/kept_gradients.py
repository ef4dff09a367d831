"""The reduced gradients of a call's last step, which histograms show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from raytf.distributed.reduction import Reduction
from raytf.training.shard_work import ShardWork


class KeptGradients:
    """Those of all phases of a step, if somebody wants them.

    Args:
        is_wanted: whether to keep them.
        phases: of the step, traced.
        reductions: how the tensors of each phase are added.
    """

    def __init__(self, is_wanted: bool, phases: Sequence[ShardWork], reductions: Sequence[Reduction]):
        self._is_wanted, self._phases, self._reductions = is_wanted, phases, reductions

    def nothing(self) -> list[tf.Tensor]:
        """What there is before the first step; to be traced."""
        kept = []
        for phase, adds in zip(self._phases, self._reductions, strict=True):
            variables = [phase.trainable[i] for i in phase.with_gradient] if self._is_wanted else []
            kept += [tf.zeros(v.shape, d) for v, d in zip(variables, adds.layout.dtypes, strict=False)]
        return kept

    def of(self, gradients: list[Any], optimizer: keras.optimizers.Optimizer | None) -> list[tf.Tensor]:
        """What to keep of a phase; to be traced.

        Args:
            gradients: before the update, which may change a loss scale.
            optimizer: of the phase.
        """
        if not self._is_wanted:
            return []
        gradients = [tf.convert_to_tensor(g) for g in gradients]
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            scale = tf.convert_to_tensor(optimizer.dynamic_scale)
            return [g / tf.cast(scale, g.dtype) for g in gradients]
        return gradients

    def named(self, gradients: Sequence[tf.Tensor]) -> dict[str, tf.Tensor]:
        """Those of a call, by the path of their weight; empty if they are not kept."""
        paths = [phase.trainable[i].path for phase in self._phases for i in phase.with_gradient]
        return dict(zip(paths, gradients, strict=True)) if self._is_wanted else {}
