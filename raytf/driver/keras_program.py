"""A Keras program as it is: while it runs, `keras.Model.fit` trains on workers."""

from __future__ import annotations

import contextlib
import inspect
import os
import random
import runpy
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from raytf import _keras, _process
from raytf._tensorflow import summaries
from raytf.config.train_config import TrainConfig
from raytf.distributed.gpu import visibility
from raytf.driver import replaying
from raytf.driver.connection import connected
from raytf.driver.feed.given import are_batches
from raytf.driver.fit import fit
from raytf.driver.keras_arguments import KERAS_BATCH_SIZE
from raytf.errors import ConfigError
from raytf.runs import notebook
from raytf.storage.storage import Storage


def run(script: str, args: list[str], config: TrainConfig) -> None:
    """Run a script as `python SCRIPT ARGS` does, with its training on workers.

    Args:
        script: its file.
        args: its arguments.
        config: settings of all of its runs; the name of the run is that of the script if none was given.

    Raises:
        ConfigError: there is no such file, or the program uses another backend of Keras.
        RaytfError: any error of `fit`.
        Exception: whatever the script raises.
    """
    path = Path(script)
    if not path.is_file():
        raise ConfigError(f"{script}: there is no such file. Expected: raytf run [flags] SCRIPT.py [its arguments]")
    backend = os.environ.get("KERAS_BACKEND", "tensorflow")
    if backend != "tensorflow":
        raise ConfigError(f"KERAS_BACKEND={backend}: raytf trains with tensorflow. Unset it, or set it to tensorflow.")
    if config.run.run == TrainConfig().run.run:
        config = config.replace(run="".join(c if c.isalnum() or c in "-_." else "-" for c in path.stem).lstrip("."))
        config.check()
    # What the program prints is its own, where nobody watches; and GPUs are the workers'.
    with visibility.unseen(), notebook.display(verbose=int(sys.stdout.isatty())) as display:
        display.stage("importing TensorFlow")
        _process.load_tensorflow()
    # Of a program that seeds nothing, a start after a crash should draw what the one before drew.
    _keras.seed_all(config.batch.seed)
    sys.argv[:] = [script, *args]
    sys.path[0] = str(path.resolve().parent)
    with trained_by_workers(config):
        runpy.run_path(script, run_name="__main__")


@contextlib.contextmanager
def trained_by_workers(config: TrainConfig) -> Iterator[None]:
    """While the `with` statement lasts, `keras.Model.fit` trains on workers: the n-th call is the run NAME/n."""
    folder, count = Storage(config.storage_uri).child(config.run.run).uri, 0

    def train(model: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        with _draws_kept():
            if count == 1:  # one Ray for all calls, which draws when it starts
                with notebook.display() as display:
                    stack.enter_context(connected(replaying.with_room(config), display.stage))
            return _fit(model, config.replace(storage=folder, run=str(count)), own, args, kwargs)

    with contextlib.ExitStack() as stack, summaries.noted_writers(), _keras.with_fit(train) as own:
        yield


def _fit(model: Any, config: TrainConfig, own: Callable[..., Any], args: tuple[Any, ...], given: dict[str, Any]) -> Any:
    """What `keras.Model.fit` does, on workers."""
    bound = inspect.signature(own).bind(model, *args, **given)
    asked = dict(bound.arguments)
    del asked[next(iter(asked))]
    x = asked.pop("x", None)
    if asked.get("batch_size") is None and asked.get("steps_per_epoch") is None and not are_batches(x):
        asked["batch_size"] = KERAS_BATCH_SIZE
    asked.setdefault("epochs", 1)
    if asked.get("initial_epoch", 0) >= asked["epochs"]:
        return own(model, *args, **given)  # nothing is trained
    result = fit(model, x, asked.pop("y", None), config=config, **asked)
    return _keras.history(model, result.params, result.history, result.epoch)


@contextlib.contextmanager
def _draws_kept() -> Iterator[None]:
    """Leave Python's and NumPy's generators as they are.

    What the program draws afterwards is then the same whether a `fit` trains or had finished in an earlier start.
    """
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
