"""The job that the driver sends to each worker."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from raytf.config import precision
from raytf.config.precision import Precision
from raytf.config.train_config import TrainConfig
from raytf.data.pipeline import Augment
from raytf.data.plan import StepPlan
from raytf.data.sources import Source
from raytf.distributed.membership.arbiter_link import ArbiterAddress
from raytf.training.user.program_settings import ProgramSettings
from raytf.training.user.user_code import Parcel

if TYPE_CHECKING:  # it imports Ray
    from raytf.training.process.monitor_client import MonitorClient


@dataclass(frozen=True)
class UserCode:
    """The user's part of a run: functions, or Keras objects that the program has made.

    Attributes:
        model: a compiled keras.Model, or a function that returns one.
        callbacks: Keras callbacks, or a function that returns them.
        augment: augments each micro-batch.
        warning_filters: the program's, as `warnings.filters` has them.
        log_levels: the levels of the program's loggers, by name.
        writer: the program's default summary writer, and its default step.
    """

    model: Any
    callbacks: Any = None
    augment: Augment | None = None
    warning_filters: tuple[Any, ...] = ()
    log_levels: Mapping[str, int] = field(default_factory=dict)
    writer: tuple[Any, Any] = (None, None)

    @property
    def make(self) -> Callable[[], Any]:
        """Return the function that returns the compiled model."""
        return self.model if is_function(self.model) else lambda: self.model


@dataclass(frozen=True)
class TrainingJob:
    """A run, ready to be started.

    Attributes:
        code: the user's; opened in a worker after its strategy is set up.
        sources: reference to a `Sources` in Ray's object store.
        monitor: the driver's monitor.
        run_uri: URI of the run's folder.
        total_steps: global step at which the run ends.
        stop_step: global step at which this start ends, without what follows a run's end; None for the run's own.
        dump: folder on the machine of the only worker, which writes the step there for people; empty for none.
        lease: id of the process that owns the run.
        term: the term of that process, the run's driver: see `raytf.runs.ledger`.
        identity: what the driver knows about settings and data; a resumed run must have the same.
        precision: what the job has set in the driver's Keras.
        settings: what the program has set for its process; None where the driver has not loaded Keras.
        shuffle: whether each epoch has an order of its own.
        first_epoch: number of the first epoch, for callbacks, the history and what is shown.
        verbose: 0 prints no lines about epochs.
        asked_verbose: what the program passed as `verbose`, which callbacks see.
        has_old_digests: whether the run's digests are not folded; see `digest_log.are_old`.
        arbiter: decides who belongs to the group, if the group can repair itself; None if it cannot.
    """

    code: Parcel[UserCode]
    config: TrainConfig
    sources: Any
    monitor: MonitorClient
    run_uri: str
    plan: StepPlan
    total_steps: int
    class_weight: dict[int, float] | None
    validation_freq: int | list[int]
    lease: str = ""
    term: int = 0
    identity: dict[str, str] = field(default_factory=dict)
    precision: Precision = precision.DEFAULT
    settings: ProgramSettings | None = None
    shuffle: bool = True
    first_epoch: int = 0
    verbose: int = 1
    asked_verbose: Any = "auto"
    arbiter: ArbiterAddress | None = None
    stop_step: int | None = None
    dump: str = ""
    has_old_digests: bool = False

    @property
    def end_step(self) -> int:
        """Return the global step at which this start ends."""
        return self.total_steps if self.stop_step is None else min(self.stop_step, self.total_steps)

    def epoch_of(self, step: int) -> int:
        """Return the number of the epoch in which a step is."""
        return self.first_epoch + self.plan.locate(step)[0]

    def validates_after(self, epoch: int) -> bool:
        """Return whether validation runs after an epoch, counted from 0."""
        chosen = self.validation_freq
        return epoch + 1 in chosen if isinstance(chosen, list) else (epoch + 1) % chosen == 0

    @property
    def epochs(self) -> int:
        """Return the number of the epoch after the last one."""
        return self.epoch_of(self.total_steps - 1) + 1

    @property
    def params(self) -> dict[str, Any]:
        """Return what Keras passes to callbacks about the training."""
        return {"verbose": self.asked_verbose, "epochs": self.epochs, "steps": self.plan.steps_per_epoch}

    @property
    def model(self) -> Callable[[], Any]:
        return self.code.get().make

    @property
    def callbacks(self) -> Any:
        return self.code.get().callbacks

    @property
    def augment(self) -> Augment | None:
        return self.code.get().augment


def is_function(model: Any) -> bool:
    """Return whether this is a function that returns a model, and not a model, which is callable as well."""
    return callable(model) and not hasattr(model, "compile")


@dataclass(frozen=True)
class Sources:
    """The data of a run."""

    train: Source
    validation: Source | None
    test: Source | None
