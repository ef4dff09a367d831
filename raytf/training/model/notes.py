"""Notes in a model: what is found out when it is built and traced, and its steps need to know."""

from __future__ import annotations

from dataclasses import dataclass, field

import keras

_NOTES = "_raytf_notes"


@dataclass
class MetricKinds:
    """The kinds of a model's metrics; without an entry, a metric is a sum over records.

    Attributes:
        means: ids of variables to which each shard adds its share of the batch's average.
        whole: metrics that need the whole batch.
        left_out: metrics that need it and do not get it; they are not in the logs.
    """

    means: set[int] = field(default_factory=set)
    whole: list[keras.metrics.Metric] = field(default_factory=list)
    left_out: list[keras.metrics.Metric] = field(default_factory=list)


@dataclass
class ModelNotes:
    """What is known about a model.

    Attributes:
        is_sum: whether the loss is a sum over records.
        added: which of the losses that layers add are sums over records, in calls with `training` of this value.
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
