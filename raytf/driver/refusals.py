"""What `fit` refuses of its arguments before anything is touched."""

from __future__ import annotations

from typing import Any

from raytf.config import precision
from raytf.config.objective import MetricObjective
from raytf.config.train_config import TrainConfig
from raytf.driver.tracking import tracker as trackers
from raytf.errors import ConfigError, DataError, ModelError
from raytf.training.job import is_function


def refuse(
    config: TrainConfig, own: precision.Precision, model: Any, train: Any, validation: Any, validation_freq: Any
) -> None:
    """Refuse wrong settings and arguments before anything is touched.

    Raises:
        RaytfError: a setting or an argument is wrong.
    """
    with config.named_as_typed():
        _refuse(config, own, model, train, validation, validation_freq)


def _refuse(
    config: TrainConfig, own: precision.Precision, model: Any, train: Any, validation: Any, validation_freq: Any
) -> None:
    config.check()
    trackers.check(config.run.track)
    chosen = precision.choose(config.compute.mixed_precision, own)
    if config.strategy.has_servers:
        precision.check_for_servers(chosen.policy)
    if train is None:
        raise DataError("there is no training data: fit(model, x) got None.")
    is_list = isinstance(validation_freq, list)
    if not is_list and not (isinstance(validation_freq, int) and validation_freq >= 1):
        raise DataError(f"validation_freq is {validation_freq}. Expected 1 or more, or a list of epochs.")
    best = config.checkpoints.keep_best
    if validation is None and best is not None and MetricObjective.of(best).metric.startswith("val_"):
        raise ConfigError(f"--keep-best {best}: there is no validation data. Give some, or a metric of training.")
    if is_function(model):
        return
    if not hasattr(model, "compile"):
        raise ModelError(
            f"fit(model, ...) got a {type(model).__name__}. Expected a compiled keras.Model, or a function without "
            "arguments that returns one."
        )
    if not getattr(model, "compiled", False):
        raise ModelError("the model is not compiled. Call model.compile(optimizer=..., loss=...) before fit.")
    if config.strategy.has_servers:
        raise ModelError(
            "--strategy parameter-server makes variables in pieces on servers, which an object cannot bring. Give fit "
            "a function that returns the model, or leave the strategy out."
        )
