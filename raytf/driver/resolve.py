"""Converts the arguments of `fit` into a job, after checking them and converting them to raytf's own types.

Nothing here writes, reads storage or starts a process.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raytf import _tensorflow
from raytf.audit import step_replay
from raytf.audit.step_replay import ReplayPlan
from raytf.config import precision, program
from raytf.config.keywords import FitSettings
from raytf.config.precision import Precision
from raytf.config.program import Program
from raytf.config.train_config import TrainConfig, by_name
from raytf.data.pipeline import Augment
from raytf.data.sources.batches import plan_of
from raytf.driver import inputs, preflight, run_names
from raytf.driver.inputs import RunData
from raytf.driver.tracking import trackers
from raytf.errors import ConfigError, DataError
from raytf.runs import notebook
from raytf.runs.program_output import log_levels
from raytf.training.job import Sources, TrainingJob, UserCode
from raytf.training.process.monitor_client import MonitorClient
from raytf.training.user import program_settings
from raytf.training.user.user_code import Parcel

#: Records per step if neither the call nor a flag sets them, as in Keras.
KERAS_BATCH_SIZE = 32
#: Keras's argument -> the name of raytf's setting.
_SETTINGS = {"batch_size": "global_batch_size"}
#: Settings for the length of a run: one of them replaces the other.
_LENGTHS = ("epochs", "steps")


@dataclass(frozen=True)
class FitArguments:
    """The arguments of `fit`, by their names there."""

    model: Any
    x: Any = None
    y: Any = None
    batch_size: int | None = None
    epochs: int | None = None
    verbose: int | str = "auto"
    callbacks: Any = None
    validation_split: float = 0.0
    validation_data: Any = None
    shuffle: bool | str = True
    class_weight: dict[int, float] | None = None
    sample_weight: Any = None
    initial_epoch: int = 0
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: int | list[int] = 1
    train: Any = None
    validation: Any = None
    test: Any = None
    config: TrainConfig | None = None
    augment: Augment | None = None
    settings: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class FitCall:
    """A call of `fit` with valid arguments.

    Attributes:
        overruled: a line for each argument that a flag has overruled.
        x: the training data, from which class weights get their shape.
        callbacks, reporting: callbacks that run on rank 0, and callbacks of trackers, which run in the driver.
        epochs: number of epochs left to train.
        precision: the precision that the program has set in Keras.
        is_named: whether the user named the run.
        replay: the steps to compute again; None to train.
    """

    arguments: FitArguments
    config: TrainConfig
    overruled: list[str]
    data: RunData
    x: Any
    callbacks: Any
    reporting: list[Any]
    epochs: int
    verbose: int
    precision: Precision
    program: Program
    is_named: bool
    replay: ReplayPlan | None

    def code(self) -> Parcel[UserCode]:
        """Pack the user's code for the workers."""
        around = tuple(warnings.filters), log_levels(), _tensorflow.default_writer()
        return Parcel(UserCode(self.arguments.model, self.callbacks, self.arguments.augment, *around))

    def job(
        self, config: TrainConfig, code: Parcel[UserCode], sources: Sources, run_uri: str, has_old_digests: bool
    ) -> TrainingJob:
        """Return the job of this call; `config` has the run's name and logical shards. The driver completes the job on
        Ray."""
        asked, replay = self.arguments, self.replay
        plan = plan_of(sources.train, config.batch.global_batch_size, config.logical_shards)
        if plan.global_batch_size != config.batch.global_batch_size:  # the first of recorded batches is not the largest
            config = config.replace(global_batch_size=plan.global_batch_size)
        return TrainingJob(
            code=code,
            config=config,
            sources=None,
            monitor=MonitorClient(None),
            run_uri=run_uri,
            plan=plan,
            total_steps=config.length.steps or plan.epoch_start(self.epochs),
            first_epoch=asked.initial_epoch,
            class_weight=inputs.class_weights_of(asked.class_weight, self.x, sources.train.spec),
            shuffle=inputs.draws_order(asked.shuffle),
            validation_freq=asked.validation_freq,
            precision=self.precision,
            settings=program_settings.of_process(),
            verbose=self.verbose,
            asked_verbose=asked.verbose,
            stop_step=None if replay is None else replay.step,
            dump="" if replay is None else replay.dump,
            has_old_digests=has_old_digests,
        )


def resolve(asked: FitArguments) -> FitCall:
    """Check the arguments of `fit`, and convert them into a call.

    Raises:
        RaytfError: an argument is wrong, or contradicts another one.
    """
    refuse_unknown(asked.settings, [name for name in vars(asked) if name != "settings"])
    callbacks, reporting = trackers.split(several(asked.callbacks), asked.model)
    x = inputs.one_of("x", asked.x, "train", asked.train)
    validation = inputs.one_of("validation_data", asked.validation_data, "validation", asked.validation)
    is_keras_call = (inputs.is_plain(x) or asked.y is not None) and asked.steps_per_epoch is None
    size = None if inputs.are_batches(x) else asked.batch_size
    passed = {"batch_size": size, "epochs": asked.epochs, **asked.settings}
    config, overruled = settings(asked.config, passed, is_keras_call)
    with config.named_as_typed():
        if x is not None:
            split = asked.validation_split if validation is None else 0.0  # as in Keras
            x, held_out = inputs.training_data(x, asked.y, asked.sample_weight, split)
            validation = held_out if validation is None else validation
        overruled += program_settings.check()
        own_precision = precision.of_process()
        preflight.check_arguments(config, own_precision, asked.model, x, validation, asked.validation_freq)
        is_named, own_program = config.run.run is not None, program.of_process(notebook.in_notebook())
        config = run_names.named(config, own_program)
        replay = step_replay.requested(config)
        config = config if replay is None else step_replay.replay_settings(replay, config)
        epochs = epochs_left(asked.initial_epoch, config)
        x, validation, test = inputs.streams(
            (x, inputs.validation_data(validation), inputs.validation_data(asked.test)),
            config,
            asked.batch_size,
            asked.steps_per_epoch,
            asked.validation_steps,
            asked.shuffle,
            asked.validation_batch_size,
            epochs,
        )
        data = RunData.of(x, validation, test)
        if data.stream is not None:  # a stream sets the batch size itself
            config = config.replace(global_batch_size=inputs.rows_of(data.stream))
            config.check()
        none: dict[str, Any] = dict.fromkeys(
            ("x", "y", "sample_weight", "train", "validation", "validation_data", "test")
        )
        return FitCall(
            arguments=replace(asked, **none),  # the data is in `data`, and may be a copy of what was passed
            config=config,
            overruled=overruled,
            data=data,
            x=x,
            callbacks=callbacks,
            reporting=reporting,
            epochs=epochs,
            verbose=verbosity(asked.verbose),
            precision=own_precision,
            program=own_program,
            is_named=is_named,
            replay=replay,
        )


def refuse_unknown(arguments: Iterable[str], own: Iterable[str]) -> None:
    """Refuse keyword arguments that are neither `fit`'s own nor settings, and suggest the closest name."""
    settings = FitSettings.__optional_keys__
    for name in arguments:
        if name in settings:
            continue
        is_size = name == _SETTINGS["batch_size"]
        near = ["batch_size"] if is_size else difflib.get_close_matches(name, [*own, *settings], n=1)
        hint = f"Did you mean {near[0]!r}?" if near else "help(raytf.fit) lists its arguments."
        raise ConfigError(f"fit() got an unexpected keyword argument {name!r}. {hint}")


def settings(
    config: TrainConfig | None, arguments: Mapping[str, Any], is_keras_call: bool
) -> tuple[TrainConfig, list[str]]:
    """Return the settings of a call, and a line for each argument that a flag has overruled.

    A flag that differs from its default overrides an argument of the call, so that an unchanged program can be tried
    with other settings. An argument overrides a default.

    Args:
        config: the settings that were passed, if any.
        arguments: `batch_size`, `epochs` and settings of the call, with None for arguments that were not passed.
        is_keras_call: whether the data was passed as in Keras, so that Keras's own batch size is the default.
    """
    if config is not None and not isinstance(config, TrainConfig):
        raise ConfigError(
            f"config is a {type(config).__name__}. Expected a raytf.TrainConfig; or leave it out, and pass settings as "
            "keyword arguments: fit(..., workers=2)."
        )
    passed = {name: value for name, value in arguments.items() if value is not None}
    if "batch_size" not in passed and config is None and is_keras_call:
        passed["batch_size"] = KERAS_BATCH_SIZE
    values = (config or TrainConfig()).values
    taken: dict[str, Any] = {}
    overruled = []
    for argument, value in passed.items():
        its = by_name(_SETTINGS.get(argument, argument))
        plain = its.from_python(value, argument)
        flags = map(by_name, _LENGTHS if its.name in _LENGTHS else [its.name])
        flag = next((flag for flag in flags if values[flag.name] != flag.default), None)
        if flag is None:
            taken[its.name] = plain
        elif (flag, plain) != (its, values[its.name]):
            overruled.append(f"{argument}={value!r} of the program is overruled by {flag.typed(values[flag.name])}")
    if taken.keys() >= set(_LENGTHS):
        raise ConfigError("epochs and steps exclude each other: pass one of them.")
    return (config or TrainConfig()).replace(**taken), overruled


def verbosity(verbose: Any) -> int:
    """Return `verbose` of a call as 0, 1 or 2. Keras accepts any value, and shows a bar only for 1 and "auto"."""
    if not verbose:
        return 0
    return 1 if verbose in ("auto", 1) else 2


def epochs_left(initial_epoch: int, config: TrainConfig) -> int:
    """Return the number of epochs left to train; a huge number if the run's length is set in steps."""
    epochs = None if config.length.steps else config.length.epochs or 1
    if initial_epoch < 0 or (epochs is not None and initial_epoch >= epochs):
        raise DataError(
            f"initial_epoch is {initial_epoch}, and epochs is {epochs}. Expected initial_epoch from 0 to below epochs, "
            "which counts all epochs from 0 on, and not from initial_epoch."
        )
    return sys.maxsize if epochs is None else epochs - initial_epoch


def several(callbacks: Any) -> Any:
    """Return the callbacks of a call as a list, since Keras accepts a single one, too; None or a function unchanged."""
    if callbacks is None or callable(callbacks):
        return callbacks
    return list(callbacks) if isinstance(callbacks, (list, tuple)) else [callbacks]
