"""Notes in a model: facts that are found when it is built and traced, and that its training steps need."""

from __future__ import annotations

from dataclasses import dataclass, field

import keras

_NOTES = "_raytf_notes"


@dataclass
class MetricKinds:
    """The kinds of a model's metrics. A metric without an entry is a sum over records.

    Attributes:
        means: ids of variables to which each shard adds its share of the batch's average.
        whole: metrics that need the whole batch.
        left_out: metrics that need the whole batch but cannot get it; they are not in the logs.
    """

    means: set[int] = field(default_factory=set)
    whole: list[keras.metrics.Metric] = field(default_factory=list)
    left_out: list[keras.metrics.Metric] = field(default_factory=list)


@dataclass
class ModelNotes:
    """Facts about a model.

    Attributes:
        is_sum: whether the loss is a sum over records.
        added: for each value of `training` in a call, which of the losses that layers add are sums over records.
        divided: indices of the compiled losses that are divided by data.
        metrics: the kinds of the metrics.
        remarks: lines that the user should read before training starts.
    """

    is_sum: bool = False
    added: dict[bool, tuple[bool, ...]] = field(default_factory=dict)
    divided: tuple[int, ...] = ()
    metrics: MetricKinds = field(default_factory=MetricKinds)
    remarks: list[str] = field(default_factory=list)

    def take_remarks(self) -> list[str]:
        """Return the remarks that were added since the last call."""
        remarks, self.remarks = self.remarks, []
        return remarks


def notes_of(model: keras.Model) -> ModelNotes:
    """Return a model's notes, which last as long as the model."""
    notes: ModelNotes = vars(model).setdefault(_NOTES, ModelNotes())
    return notes
