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
    """The user's part of a run: functions, or Keras objects that the program created.

    Attributes:
        model: a compiled keras.Model, or a function that returns one.
        callbacks: Keras callbacks, or a function that returns them.
        augment: function that augments each micro-batch.
        warning_filters: the program's `warnings.filters`.
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
    """A run that is ready to start.

    Attributes:
        code: the user's code, which a worker unpickles after its strategy is set up.
        sources: reference to a `Sources` object in Ray's object store.
        monitor: client of the driver's monitor.
        run_uri: URI of the run's folder.
        total_steps: global step at which the run ends.
        stop_step: global step at which this start stops, without the test and export of a run's end; None to train
            to `total_steps`.
        dump: folder on the only worker's machine in which it dumps its last step; empty for no dump.
        lease: id of the process that owns the run, its driver.
        term: the driver's term: see `raytf.runs.ledger`.
        identity: identity of the settings and the data, which must not change when the run is resumed.
        precision: the precision that the job set in the driver's Keras.
        settings: the program's process-wide settings; None if the driver has not loaded Keras.
        shuffle: whether each epoch has its own order of records.
        first_epoch: number of the first epoch, for callbacks, the history and the display.
        verbose: 0 prints no lines about epochs.
        asked_verbose: the program's `verbose` argument, which callbacks see.
        has_old_digests: whether the run's digests are not folded; see `digest_log.are_old`.
        arbiter: address of the arbiter that decides who belongs to a group that can repair itself; otherwise None.
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
        """Return the number of the epoch that contains a step."""
        return self.first_epoch + self.plan.locate(step)[0]

    def validates_after(self, epoch: int) -> bool:
        """Return whether validation runs after an epoch, counted from 0."""
        chosen = self.validation_freq
        return epoch + 1 in chosen if isinstance(chosen, list) else (epoch + 1) % chosen == 0

    @property
    def epochs(self) -> int:
        """Return the number of the last epoch plus one."""
        return self.epoch_of(self.total_steps - 1) + 1

    @property
    def params(self) -> dict[str, Any]:
        """Return the `params` that Keras passes to callbacks."""
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
    """Return whether this is a function that returns a model, not a model, which is callable, too."""
    return callable(model) and not hasattr(model, "compile")


@dataclass(frozen=True)
class Sources:
    """The data of a run."""

    train: Source
    validation: Source | None
    test: Source | None
