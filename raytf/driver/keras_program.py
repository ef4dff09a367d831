"""Runs an unchanged Keras program whose calls of `keras.Model.fit` train on workers."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import runpy
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import raytf
from raytf import _keras, _process, _tensorflow
from raytf.audit import step_replay
from raytf.config.program import of_file
from raytf.config.train_config import TrainConfig
from raytf.distributed.gpu import visibility
from raytf.driver import run_names
from raytf.driver.connection import connected
from raytf.driver.fit import fit
from raytf.driver.inputs import are_batches
from raytf.driver.resolve import KERAS_BATCH_SIZE
from raytf.errors import ConfigError, JobError, RaytfError
from raytf.runs import notebook
from raytf.runs.display import lines_on_stderr
from raytf.storage.storage import Storage
from raytf.training.user import program_settings, user_code

#: The batch size unless a flag sets another one.
_USUAL = TrainConfig().batch.global_batch_size


def run(script: str, args: list[str], config: TrainConfig) -> None:
    """Run a script as `python SCRIPT ARGS` does, with its training on workers.

    Args:
        script: the script's file.
        args: the script's arguments.
        config: settings of all runs of the script. Runs are named after the script if `config` has no name.

    Raises:
        ConfigError: there is no such file, or the program uses another backend of Keras.
        RaytfError: any error of `fit`, including an uncaught exception of the script's own code in a worker.
        Exception: anything else that the script raises.
    """
    path = Path(script)
    if not path.is_file():
        raise ConfigError(f"{script}: there is no such file. Expected: raytf run [flags] SCRIPT.py [its arguments]")
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    if backend != "tensorflow":
        raise ConfigError(f"KERAS_BACKEND={backend}: raytf trains with tensorflow. Unset it, or set it to tensorflow.")
    own_program, is_named, is_new = of_file(script), config.run.run is not None, config.run.new
    config = run_names.named(config, own_program)
    config.check()
    # GPUs are reserved for the workers, and standard output for the program.
    with visibility.unseen(), lines_on_stderr(), notebook.display() as display:
        if not step_replay.is_requested():
            Storage(config.storage_uri).preflight()
            config = run_names.settled(config, own_program, is_named, display.say, run_names.FIRST_OF_PROGRAM)
        display.stage("importing TensorFlow")
        _process.load_tensorflow()
    # If a program sets no seed, a start after a crash should draw the same numbers as the start before.
    _keras.seed_all(config.batch.seed)
    sys.argv[:] = [script, *args]
    sys.path[0] = str(path.resolve().parent)
    with run_names.unused_removed(config, is_new), trained_by_workers(config), _explained():
        runpy.run_path(script, run_name="__main__")


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Replace an exception of the program's code on a worker with raytf's error, with the program's lines only."""
    try:
        yield
    except Exception as error:
        explanation = user_code.explanation(error)
        if explanation is None:
            raise
        if isinstance(explanation, JobError):
            explanation.traceback = _joined(error, explanation.traceback)
        raise explanation from None


def _joined(error: Exception, below: str) -> str:
    """Return one traceback of the program's lines: the lines that called `fit`, then the lines that ran in a worker."""
    package = str(Path(raytf.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    first = max(i for i, frame in enumerate(frames) if frame.filename == "<frozen runpy>") + 1
    own = [frame for frame in frames[first:] if not frame.filename.startswith(package)]
    header, _, rest = below.rpartition("Traceback (most recent call last):\n")
    return f"{header}Traceback (most recent call last):\n{''.join(traceback.format_list(own))}{rest}".rstrip()


@contextlib.contextmanager
def trained_by_workers(config: TrainConfig) -> Iterator[None]:
    """Make `keras.Model.fit` train on workers inside the `with` statement; the n-th call is the run NAME/n.

    raytf's own lines go to the current standard error, even if the program replaces it later.
    """
    folder, count = Storage(config.storage_uri).child(config.run.name).uri, 0

    def train(model: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        program_settings.check()
        with _draws_kept():
            if count == 1:  # one Ray serves all calls; its start draws random numbers
                with notebook.display() as display:
                    stack.enter_context(connected(step_replay.with_room(config), display.stage))
            return _fit(model, config.of_program(folder, count), own, args, kwargs)

    replaced = _keras.with_fit(train)
    with contextlib.ExitStack() as stack, lines_on_stderr(), _tensorflow.noted_writers(), replaced as own:
        yield


def _fit(model: Any, config: TrainConfig, own: Callable[..., Any], args: tuple[Any, ...], named: dict[str, Any]) -> Any:
    bound = inspect.signature(own).bind(model, *args, **named)
    asked = dict(bound.arguments)
    del asked[next(iter(asked))]
    x = asked.pop("x", None)
    has_size = asked.get("batch_size") is not None or config.batch.global_batch_size != _USUAL
    if not has_size and asked.get("steps_per_epoch") is None and not are_batches(x):
        config = config.replace(global_batch_size=KERAS_BATCH_SIZE)
    asked.setdefault("epochs", 1)
    _limit(asked)
    if asked.get("initial_epoch", 0) >= asked["epochs"]:
        return own(model, *args, **named)  # nothing is trained
    try:
        result = fit(model, x, asked.pop("y", None), config=config, **asked)
    except RaytfError as error:
        raised = user_code.original(error)
        if raised is None:
            raise
        raise raised from raised.__cause__
    return _keras.history(model, result.params, result.history, result.epoch)


def _limit(asked: dict[str, Any]) -> None:
    """Limit the arguments of a `fit` to what `keras.config` allows, as Keras does."""
    for name, most in (("epochs", _keras.max_epochs()), ("steps_per_epoch", _keras.max_steps_per_epoch())):
        if most and (not asked.get(name) or asked[name] > most):
            warnings.warn(f"Limiting {name} to {most}", stacklevel=2)
            asked[name] = most


@contextlib.contextmanager
def _draws_kept() -> Iterator[None]:
    """Restore the states of Python's and NumPy's random generators afterwards.

    The program's later random numbers are then the same whether a `fit` trains or had finished in an earlier start.
    """
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
