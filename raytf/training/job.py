"""What the driver sends to each worker."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raytf.config import precision
from raytf.config.precision import Precision
from raytf.config.train_config import TrainConfig
from raytf.data.pipeline import Augment
from raytf.data.plan import StepPlan
from raytf.data.sources import Source

if TYPE_CHECKING:  # it imports Ray
    from raytf.training.monitor_client import MonitorClient


@dataclass(frozen=True)
class TrainingJob:
    """A run, ready to be started.

    Attributes:
        model: function that returns a compiled keras.Model.
        sources: reference to a `Sources` in Ray's object store.
        monitor: the driver's monitor.
        run_uri: URI of the run's folder.
        total_steps: global step at which the run ends.
        lease: id of the process that owns the run.
        identity: what the driver knows about settings and data; a resumed run must have the same.
        precision: what the job has set in the driver's Keras.
    """

    model: Callable[[], Any]
    config: TrainConfig
    sources: Any
    monitor: MonitorClient
    run_uri: str
    plan: StepPlan
    total_steps: int
    callbacks: Any
    class_weight: dict[int, float] | None
    augment: Augment | None
    validation_freq: int
    lease: str = ""
    identity: dict[str, str] = field(default_factory=dict)
    precision: Precision = precision.DEFAULT


@dataclass(frozen=True)
class Sources:
    """The data of a run."""

    train: Source
    validation: Source | None
    test: Source | None
