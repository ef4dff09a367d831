"""Learning-rate scaling and warm-up: what the model's own rate is multiplied by at a step. No Ray, no TensorFlow here.

A function of the configuration and the step alone. In Horovod the global batch grows with the number of workers, and
the rate with it; here the global batch is a setting, so the rate follows that, and no number of workers appears in it.
"""

from __future__ import annotations

from dataclasses import dataclass

from raytf.sections import RateSection


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
    """What the flags ask for; None where that is nothing."""
    ratio = global_batch_size / section.base_batch_size
    factor = {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[section.scale_learning_rate]
    steps = round(section.warmup_epochs * steps_per_epoch)
    return RateLaw(factor, steps) if factor != 1 or steps > 0 else None


def rate_identity(section: RateSection) -> dict[str, str]:
    """What must not change when a run is resumed; nothing where no flag is given, as in runs of earlier versions."""
    asked: dict[str, str] = {}
    if section.scale_learning_rate != "none":
        base = f"--base-batch-size {section.base_batch_size}"
        asked["--scale-learning-rate"] = f"{section.scale_learning_rate} from {base}"
    if section.warmup_epochs:
        asked["--warmup-epochs"] = f"{section.warmup_epochs:g}"
    return asked
