"""Keras callbacks with several workers: they run only on rank 0, which sends their changes to the other ranks.

So files are written and messages printed once, as on one machine, and EarlyStopping, ReduceLROnPlateau and
LearningRateScheduler have the same effect on all ranks. Any hook can stop training and change variables: weights,
variables of the optimizer and of metrics, and variables of the program that the step reads.

A call of the training step runs several steps, but a batch hook can only run between two calls. So a callback that
needs every batch hook reduces the length of calls to one step, or to `steps_per_execution` or `--steps-per-call`, after
which Keras runs batch hooks, too. Some of Keras's own callbacks define batch hooks that need not run after each batch.
They are listed in `_PASSIVE`, and do not change the length of calls.
"""

from __future__ import annotations

import csv
import dis
import functools
import itertools
import json
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import keras
import numpy as np

from raytf import _keras
from raytf.checkpoint import variables
from raytf.distributed.group import Ranks
from raytf.errors import ModelError
from raytf.inference.user_model import run_user_code
from raytf.runs.program_output import ProgramOutput
from raytf.storage.storage import Storage
from raytf.training.user import callback_state, later_files
from raytf.training.user.callback_state import KeptObjects

_BEGIN = ("on_train_batch_begin", "on_batch_begin")
_HOOKS = (*_BEGIN, "on_train_batch_end", "on_batch_end")
_TEST = ("on_test_batch_begin", "on_test_batch_end")

#: Keras's callbacks whose batch hooks can run less often, and the condition: they change nothing and count nothing.
_PASSIVE: list[tuple[type, Callable[[Any], bool]]] = [
    (keras.callbacks.ModelCheckpoint, lambda callback: callback.save_freq == "epoch"),
    (keras.callbacks.OrbaxCheckpoint, lambda callback: callback.save_freq == "epoch"),
    # Its profiler starts and stops at the batches that `profile_batch` names.
    (keras.callbacks.TensorBoard, lambda callback: callback.update_freq == "epoch" and not _keras.profiles(callback)),
]


class BatchHooks(NamedTuple):
    """The properties of the callbacks' batch hooks that every rank needs; only rank 0 has the callbacks.

    Attributes:
        each: whether a callback needs the hooks of every batch.
        steer: whether hooks may change variables, so that the ranks must agree after the end of a batch.
        steer_begin: whether hooks before a batch may do so, too, so that the ranks must also agree after these.
        take_nan: whether a callback handles a loss that is not finite, which is then no error.
        test: whether a callback needs the hooks of every batch of an evaluation.
    """

    each: bool = False
    steer: bool = False
    steer_begin: bool = False
    take_nan: bool = False
    test: bool = False

    @classmethod
    def of(cls, callbacks: Sequence[keras.callbacks.Callback]) -> BatchHooks:
        """Return the properties of the batch hooks of these callbacks."""
        active = [callback for callback in callbacks if overrides_hook(callback) and not _is_passive(callback)]
        return cls(
            each=bool(active),
            steer=bool(active),
            steer_begin=any(overrides_hook(callback, _BEGIN) for callback in active),
            take_nan=any(isinstance(callback, keras.callbacks.TerminateOnNaN) for callback in callbacks),
            test=any(overrides_hook(callback, _TEST) and not _is_passive(callback) for callback in callbacks),
        )


def overrides_hook(callback: keras.callbacks.Callback, hooks: Iterable[str] = _HOOKS) -> bool:
    """Return whether a callback overrides at least one of these hooks."""
    return any(not _keras.is_default_hook(getattr(callback, hook)) for hook in hooks)


def _is_passive(callback: keras.callbacks.Callback) -> bool:
    return any(
        isinstance(callback, kind) and is_passive(callback) and not _has_other_hooks(callback, kind)
        for kind, is_passive in _PASSIVE
    )


def _has_other_hooks(callback: keras.callbacks.Callback, kind: type) -> bool:
    return any(
        hook in vars(callback) or getattr(type(callback), hook) is not getattr(kind, hook) for hook in (*_HOOKS, *_TEST)
    )


_ADVICE = (
    "Compile before `fit`, and call `fit` twice: once until the change, and again after it (with `initial_epoch`)."
)
#: Callbacks that change no weights, so the weights need not be compared before and after their hooks. Classes that a
#: user derives from them may change weights.
_HARMLESS = (
    keras.callbacks.History,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.TerminateOnNaN,
)


#: Callbacks that do nothing in raytf -> the reason.
_REPLACED: dict[type, str] = {
    keras.callbacks.BackupAndRestore: "raytf itself saves and restores",
    keras.callbacks.ProgbarLogger: "raytf itself shows the progress",
}
#: The beginning of the line about objects whose changes stay in the worker.
_UNSENT = "WARNING: changes that callbacks make to these objects stay in the worker and are not sent back: "
#: The part of the state with the `trainable` flags that callbacks have set.
_TRAINABLE = "trainable"
#: The keys of a history entry other than its logs.
_OWN = ("epoch", "step")


class Callbacks:
    """The user's callbacks; does nothing if there are none.

    Args:
        make: a list of callbacks, or a function that takes the folder for files and returns such a list; None for no
            callbacks.
        model: the model, built and compiled.
        group: all ranks; each must construct this object and make the same calls.
        say: called with the output and warnings of callbacks, and with raytf's own lines.
        files: local folder whose files are copied to the run's folder.
        params: `verbose`, `epochs`, and `steps` per epoch, as Keras passes them to callbacks.
        epoch: epoch in which the run resumes; None for a new run.
        watch: returns a context manager to hold while the user's code runs.
    """

    #: The properties of batch hooks, if all ranks know them already.
    _known_batches: BatchHooks | None = None

    def __init__(
        self,
        make: list[keras.callbacks.Callback] | Callable[[str], list[keras.callbacks.Callback]] | None,
        model: keras.Model,
        group: Ranks,
        say: Callable[[str | ProgramOutput], None],
        files: str,
        params: dict[str, Any],
        epoch: int | None,
        watch: Callable[[], AbstractContextManager[None]] = nullcontext,
    ):
        self._model, self._group, self._say, self._watch = model, group, say, watch
        self._make, self._params = make, params
        #: Whether the user passed callbacks; the same on all ranks.
        self.active = bool(make)
        self._list: list[keras.callbacks.Callback] = []
        self._hooks: keras.callbacks.CallbackList | None = None
        #: The objects that the callbacks can reach, and the guard of the model; set by `_construct`.
        self._kept: KeptObjects | None = None
        self._guard: ModelGuard | None = None
        #: Logs of the newest epoch, with the changes of callbacks; None on all ranks but rank 0.
        self._logs: dict[str, Any] | None = None
        self._reader = LogsReader()
        #: Finds the variables that a hook changes.
        self._changes = variables.Changes(lambda: self._variables)
        if self.active and group.rank == 0 and self._known_batches is None:
            self._construct(files, epoch)
        #: The properties of batch hooks, which are the same on all ranks.
        self.batches = self._agree_on_batches(BatchHooks.of(self._list))
        model.stop_training = False

    def _construct(self, files: str, epoch: int | None) -> None:
        make = self._make
        made = run_user_code("the callbacks function", lambda: make(files)) if callable(make) else make
        self._list = _completed(made or [])
        for kind, why in _REPLACED.items():
            if any(isinstance(c, kind) for c in made or []):
                self._say(f"{kind.__name__} does nothing here: {why}")
        for callback in self._list:
            if epoch is not None and isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True  # otherwise the rows of earlier attempts would be lost
                _drop_rows(callback, epoch)
        later_files.write_in(files)
        self._guard = ModelGuard(self._model)
        kept = None if callable(make) else KeptObjects(self._list, self._model)
        with self._guard.watching("a callback's set_model"):
            everyone = [*self._list, self._reader]
            self._hooks = keras.callbacks.CallbackList(everyone, model=self._model, **self._params)
        # If a function created the callbacks, their contents count only now, after their setup on this machine.
        self._kept = kept or KeptObjects(self._list, self._model)
        if epoch is None and self._kept.unsent:
            self._say(_UNSENT + ", ".join(self._kept.unsent))

    def _agree_on_batches(self, own: BatchHooks) -> BatchHooks:
        """Send rank 0's properties of batch hooks to all ranks, unless they already know them."""
        if self._known_batches is not None or not self.active:
            return self._known_batches or BatchHooks()
        return BatchHooks(*(bool(each) for each in self._group.sum(np.array(own, np.float64))))

    @property
    def has_batch_hooks(self) -> bool:
        """Return whether some callback overrides a batch hook; False on all ranks but rank 0."""
        return any(overrides_hook(c) for c in self._list)

    @property
    def _is_risky(self) -> bool:
        return any(type(c) not in _HARMLESS for c in self._list)

    @property
    def stopped(self) -> bool:
        """Return whether a callback requested to stop training; equal on all ranks after `run`."""
        return bool(self._model.stop_training)

    def run(self, hook: str, *args: Any) -> None:
        """Run a hook on rank 0 and send its changes to all ranks; all ranks must call this."""
        if self.active:
            self._agree_on_effects(self._run(hook, args, self._is_risky))

    def run_batch(self, hook: str, *args: Any) -> None:
        """Run a batch hook on rank 0, and send its changes to all ranks if a callback may make some."""
        is_end = hook == "on_train_batch_end"
        changed = self._run(hook, args, self.batches.steer) if self.has_batch_hooks else ()
        if self.batches.steer_begin or (is_end and self.batches.steer):
            self._agree_on_effects(changed)

    def _run(self, hook: str, args: Sequence[Any], may_change: bool) -> Sequence[int]:
        """Run a hook once on the rank with the callbacks; return the places of the variables that it changed."""
        if self._hooks is None or not self._is_first(hook, args):
            return ()
        with self._watch():
            if may_change:
                self._changes.begin()
            self._call(hook, args)
            return self._changes.end() if may_change else ()

    def _call(self, hook: str, args: Sequence[Any]) -> None:
        what = f"a callback's {hook}"
        args = [for_hooks(each) if isinstance(each, dict) else each for each in args]
        with self._guard.watching(what) if self._guard is not None and self._is_risky else nullcontext():
            run_user_code(what, lambda: getattr(self._hooks, hook)(*args), self._say)
        if hook == "on_epoch_end":
            self._logs = for_history(self._reader.logs, self._say)

    def end_epoch(self, epoch: int, logs: dict[str, Any]) -> dict[str, Any]:
        """Run `on_epoch_end`, and return the logs with the callbacks' changes, which are equal on all ranks. All ranks
        must call this."""
        self.run("on_epoch_end", epoch, logs)
        return self._shared_logs() if self.active else dict(sorted(logs.items()))

    def _shared_logs(self) -> dict[str, Any]:
        """Return rank 0's logs of the newest epoch, on all ranks."""
        own = b"" if self._group.rank else json.dumps(self._logs).encode()
        return json.loads(self._group.share(own))

    def begin(self, what: str, step: int) -> None:
        """Record that an activity begins at a step; it is repeated from there if a worker is lost during it."""

    def _is_first(self, hook: str, args: Sequence[Any]) -> bool:
        return True

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Return (values, arrays) that a later attempt needs; empty on all ranks but rank 0."""
        if self._kept is None or self._guard is None:
            return {}, {}
        values, arrays = self._kept.state()
        return values | ({_TRAINABLE: self._guard.trainable} if self._guard.is_changed else {}), arrays

    def load_state(self, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Restore the result of `state`; callbacks that did not exist then keep their current state."""
        if self._kept is None or self._guard is None:
            return
        callback_state.load_old(self._list, values, arrays)
        failed = self._kept.load(values, arrays)
        if failed:
            self._say(f"WARNING: the state of callbacks could not be restored: {', '.join(failed)}")
        self._guard.trainable = values.get(_TRAINABLE, self._guard.trainable)

    def keep(self, run: Storage) -> None:
        """Write the state at the end of a run, for `give_back`; on rank 0."""
        if self._kept is not None:
            callback_state.keep(run, *self.state())
            lost = self._kept.lost()
            if lost:
                self._say(f"WARNING: objects of callbacks cannot be sent back: {', '.join(lost)}")

    def _agree_on_effects(self, changed: Sequence[int]) -> None:
        own = [float(self._model.stop_training), self._rate or 0.0]
        own += np.isin(np.arange(len(self._variables)), changed).tolist()
        if self._group.rank != 0:
            own = [0.0] * len(own)
        stop, rate, *is_changed = self._group.sum(np.array(own, np.float64))
        self._take_effects(bool(stop), rate)
        self._send([place for place, is_one in enumerate(is_changed) if is_one])

    @property
    def _rate(self) -> float | None:
        """Return the learning rate; None if a schedule computes it, or if there are several."""
        optimizer = self._model.optimizer
        if not _keras.has_one_rate(optimizer):
            return None
        inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
        scheduled = isinstance(_keras.given_rate(inner), keras.optimizers.schedules.LearningRateSchedule)
        return None if scheduled else float(optimizer.learning_rate)

    def _take_effects(self, stop: bool, rate: float) -> None:
        self._model.stop_training = stop
        if self._group.rank != 0 and self._rate is not None:
            self._model.optimizer.learning_rate = rate

    def _send(self, places: Collection[int]) -> None:
        """Send rank 0's values of variables to all ranks."""
        if not places:
            return
        changed = [self._variables[place] for place in places]
        arrays = self._group.broadcast([np.asarray(keras.ops.convert_to_numpy(v.value)) for v in changed])
        if self._group.rank != 0:
            for variable, value in zip(changed, arrays, strict=True):
                variable.assign(value)

    @functools.cached_property
    def _variables(self) -> list[keras.Variable]:
        """Return the variables that hooks may change and that the step reads, in one order on all ranks."""
        return list(variables.variables(self._model).values())


class ModelGuard:
    """Compares a model before and after hooks.

    As in Keras, setting `layer.trainable` in a hook does not change the step, which is already traced. Each hook sees
    the flags that earlier hooks have set. Between hooks the model has the flags with which training began, so that a
    step that is traced again, on this rank or on another one, is the same.

    Args:
        model: the model, built and compiled, before `set_model` of the callbacks.
    """

    def __init__(self, model: keras.Model):
        self._model = model
        self._parts = _keras.step_parts(model)
        self._before = _keras.trainable_flags(model)
        #: The flags that callbacks have set.
        self.trainable = self._before

    @property
    def is_changed(self) -> bool:
        """Return whether callbacks have changed `trainable` since training began."""
        return self.trainable != self._before

    @contextmanager
    def watching(self, what: str) -> Iterator[None]:
        """Refuse changes to the model that the traced step ignores.

        Args:
            what: the code that runs in the `with` block, for the message.

        Raises:
            ModelError: a part of the model was replaced, even if the hook raised another error because of it.
        """
        if self.is_changed:
            _keras.set_trainable_flags(self._model, self.trainable)
        try:
            yield
        finally:
            names = _keras.replaced_parts(self._parts, self._model)
            if names:
                raise ModelError(_refusal(what, names))
            self.trainable = _keras.trainable_flags(self._model)
            if self.is_changed:
                _keras.set_trainable_flags(self._model, self._before)


def foreseen(callbacks: Any) -> list[str]:
    """Return a warning for each hook with code that is refused when it runs, such as `self.model.compile(...)`.

    A hook may never reach this code, so this function refuses nothing.

    Args:
        callbacks: a list of Keras callbacks; anything else is not inspected.
    """
    lines = []
    for callback in callbacks if isinstance(callbacks, (list, tuple)) else ():
        kinds = [kind for kind in type(callback).__mro__ if not kind.__module__.startswith("keras.")]
        functions = {name: value for kind in reversed(kinds) for name, value in vars(kind).items()}
        functions |= vars(callback)  # includes the hooks of a LambdaCallback
        for name, function in functions.items():
            does = _change_in(getattr(function, "__code__", None))
            if does:
                lines.append(f"{type(callback).__name__}.{name} {does}, which ends the run when it happens. {_ADVICE}")
    return lines


def _change_in(code: Any) -> str:
    """Return the change that a function makes to parts of the model that the step uses; empty if none is found."""
    steps = [] if code is None else [(step.opname, step.argval) for step in dis.get_instructions(code)]
    for (_, owner), (kind, name) in itertools.pairwise(steps):
        if owner == "model" and name == "compile" and kind in ("LOAD_ATTR", "LOAD_METHOD"):
            return "compiles the model again"
        if owner == "model" and name in ("optimizer", "loss") and kind == "STORE_ATTR":
            return f"replaces the model's {name}"
    return ""


def _refusal(what: str, names: list[str]) -> str:
    done = "compiled the model again" if "compile()" in names else f"replaced {' and '.join(names[:2])} of the model"
    return f"{what} has {done}. The training step was traced before, so the change would have no effect. {_ADVICE}"


def give_back(
    run: Storage, callbacks: Sequence[keras.callbacks.Callback], model: keras.Model, params: dict[str, Any]
) -> None:
    """Restore the final state of a run in the program's callbacks and in the objects that they share with the program.

    Args:
        run: the run's folder.
        callbacks: the callbacks with which the run was started.
        model: the trained model.
        params: the run's `params`, as Keras passes them to callbacks.
    """
    values, arrays = callback_state.kept(run)
    own = _completed(callbacks)
    kept = KeptObjects(own, model)
    for callback in own:
        callback.set_params(params)
        callback.set_model(model)
    callback_state.load_old(own, values, arrays)
    failed = kept.load(values, arrays)
    if failed:
        print(f"WARNING: the state of callbacks does not fit this program: {', '.join(failed)}", file=sys.stderr)
    if _TRAINABLE in values:
        _keras.set_trainable_flags(model, values[_TRAINABLE])


def _completed(callbacks: Sequence[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    """Return the callbacks that run, and Keras's History, which other callbacks may read as `model.history`."""
    own = [c for c in callbacks if not isinstance(c, tuple(_REPLACED))]
    return own if any(isinstance(c, keras.callbacks.History) for c in own) else [*own, keras.callbacks.History()]


def _drop_rows(logger: keras.callbacks.CSVLogger, epoch: int) -> None:
    if not os.path.isfile(logger.filename):
        return
    try:
        with open(logger.filename, newline="", errors="surrogateescape") as file:
            header, *rows = list(csv.reader(file, delimiter=logger.sep)) or [[]]
    except (OSError, csv.Error):
        return  # the file is damaged, but it is only a log
    if "epoch" in header:
        place = header.index("epoch")
        with open(logger.filename, "w", newline="", errors="surrogateescape") as file:
            kept = [row for row in rows if len(row) > place and _is_before(row[place], epoch)]
            csv.writer(file, delimiter=logger.sep, lineterminator="\n").writerows([header, *kept])


def _is_before(text: str, epoch: int) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 16 and int(text) < epoch


class LogsReader(keras.callbacks.Callback):
    """The last callback, which gets the logs of an epoch with the changes of the other callbacks."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: dict[str, Any] = {}

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.logs = dict(logs or {})


def for_hooks(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return logs for hooks. As in Keras, a metric with several numbers is an array."""
    return {name: np.asarray(each, np.float32) if isinstance(each, list) else each for name, each in logs.items()}


def for_history(logs: Mapping[str, Any], say: Callable[[str], None]) -> dict[str, Any]:
    """Return logs as JSON values: numbers, texts, lists and dicts. Report and leave out any other value."""
    kept = {}
    for name, value in logs.items():
        try:
            if not isinstance(name, str) or name in _OWN:
                raise TypeError("its name must be a text other than 'epoch' and 'step'")
            kept[name] = _plain(value)
        except TypeError as error:
            say(f"WARNING: the history leaves out {name!r}, which a callback added to the logs: {error}")
    return kept


def _plain(value: Any) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {str(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (np.generic, np.ndarray)) or keras.ops.is_tensor(value) or isinstance(value, keras.Variable):
        plain = np.asarray(keras.ops.convert_to_numpy(value)).tolist()
        return _plain(plain)
    raise TypeError(f"its value is a {type(value).__name__}")
