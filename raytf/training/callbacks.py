"""Keras callbacks with several workers: they run on rank 0 only, and what they change is sent to the other ranks.

So files are written and messages printed once, as on one machine, and EarlyStopping, ReduceLROnPlateau and
LearningRateScheduler have the same effect on all ranks. Any hook may stop training and change variables: weights, those
of optimizer and metrics, and those of the program that the step reads. `batch_hooks` says which run for each batch.
"""

from __future__ import annotations

import copy
import csv
import functools
import inspect
import json
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import keras
import numpy as np

from raytf import _keras
from raytf.checkpoint import codec, variables
from raytf.distributed.group import Ranks
from raytf.inference.user_model import run_user_code
from raytf.runs.program_output import ProgramOutput
from raytf.storage.storage import Storage
from raytf.training import batch_hooks
from raytf.training.batch_hooks import BatchHooks

#: Callbacks that change no weights, so the weights need not be compared before and after their hooks. A class that a
#: user derives from one of them may.
_HARMLESS = (
    keras.callbacks.History,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
    keras.callbacks.LearningRateScheduler,
    keras.callbacks.TerminateOnNaN,
)


#: Callbacks whose work is done elsewhere, and by what.
_REPLACED: dict[type, str] = {
    keras.callbacks.BackupAndRestore: "raytf itself saves and restores",
    keras.callbacks.ProgbarLogger: "the run's own display shows how far it is",
}
#: Stands for the value of a setting that is never state, whatever its value.
_NEVER = object()


#: In the run's folder: what callbacks kept in themselves, and the name of that part which is not arrays.
STATE_FILE, _VALUES = "callbacks.safetensors", "values"


class Callbacks:
    """The user's callbacks; does nothing if there are none.

    Args:
        make: a list of callbacks, or a function that takes the folder for files and returns such a list; None for no
            callbacks.
        model: built and compiled.
        group: all ranks; each must construct this object and make the same calls.
        say: called with what callbacks print and warn of, and with raytf's own lines.
        files: local folder whose files are copied to the run's folder.
        params: `epochs`, and `steps` per epoch, as Keras passes them to callbacks.
        epoch: epoch in which the run resumes from a checkpoint; None for a new run.
        watch: returns a context manager to hold while the user's code runs.
    """

    #: What the other ranks know of the hooks of batches, where they know it already.
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
        #: Whether the user gave callbacks; the same on all ranks.
        self.active = bool(make)
        self._list: list[keras.callbacks.Callback] = []
        self._hooks: keras.callbacks.CallbackList | None = None
        #: Each callback's settings, such as a path on this machine; a restart constructs them again.
        self._settings: list[dict[str, Any]] = []
        #: Finds the variables that a hook changes.
        self._changes = variables.Changes(lambda: self._variables)
        if self.active and group.rank == 0 and self._known_batches is None:
            self._construct(files, epoch)
        #: What the ranks know of the hooks of batches; the same on all ranks.
        self.batches = self._agree_on_batches(batch_hooks.of(self._list))
        model.stop_training = False

    def _construct(self, files: str, epoch: int | None) -> None:
        make = self._make
        made = run_user_code("the callbacks function", lambda: make(files)) if callable(make) else make
        self._list = _without_replaced(made or [])
        for kind, why in _REPLACED.items():
            if any(isinstance(c, kind) for c in made or []):
                self._say(f"{kind.__name__} does nothing here: {why}")
        for callback in self._list:
            if epoch is not None and isinstance(callback, keras.callbacks.CSVLogger):
                callback.append = True  # otherwise the rows of earlier attempts would be lost
                _drop_rows(callback, epoch)
        self._hooks = keras.callbacks.CallbackList(self._list, model=self._model, **self._params)
        self._settings = [_settings_of(c) for c in self._list]

    def _agree_on_batches(self, own: BatchHooks) -> BatchHooks:
        """Tell all ranks what rank 0 knows of the hooks of batches, unless they know it."""
        if self._known_batches is not None or not self.active:
            return self._known_batches or BatchHooks()
        return BatchHooks(*(bool(each) for each in self._group.sum(np.array(own, np.float64))))

    @property
    def has_batch_hooks(self) -> bool:
        """Whether some callback overrides a batch hook; False on all ranks but rank 0."""
        return any(batch_hooks.overridden(c) for c in self._list)

    @property
    def _is_risky(self) -> bool:
        return any(type(c) not in _HARMLESS for c in self._list)

    @property
    def stopped(self) -> bool:
        """Whether a callback asked to stop training; equal on all ranks after `run`."""
        return bool(self._model.stop_training)

    def run(self, hook: str, *args: Any) -> None:
        """Run a hook on rank 0 and send what it changed to all ranks; all ranks must call this."""
        if self.active:
            self._agree_on_effects(self._call(hook, args, self._is_risky))

    def run_batch(self, hook: str, *args: Any) -> None:
        """Run a batch hook on rank 0; the ranks agree afterwards only if some callback may change something in it."""
        is_end = hook == "on_train_batch_end"
        changed = self._call(hook, args, self.batches.steer) if self.has_batch_hooks else ()
        if self.batches.steer_begin or (is_end and self.batches.steer):
            self._agree_on_effects(changed)

    def _call(self, hook: str, args: Sequence[Any], may_change: bool) -> Sequence[int]:
        """Run a hook, once, where the callbacks are; return the places of the variables that it changed."""
        if self._hooks is None or not self._is_first(hook, args):
            return ()
        with self._watch():
            if may_change:
                self._changes.begin()
            run_user_code(f"a callback's {hook}", lambda: getattr(self._hooks, hook)(*args), self._say)
            return self._changes.end() if may_change else ()

    def begin(self, what: str, step: int) -> None:
        """Something begins at a step, from where it is begun again if a worker is lost in it."""

    def _is_first(self, hook: str, args: Sequence[Any]) -> bool:
        """Whether a hook must be run."""
        return True

    def state(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """(values, arrays) that a later attempt needs; empty on all ranks but rank 0."""
        values: dict[str, Any] = {}
        arrays: dict[str, np.ndarray] = {}
        for i, (callback, settings) in enumerate(zip(self._list, self._settings, strict=True)):
            key = _key(i, callback)
            own = callback.get_state() if hasattr(callback, "get_state") else vars(callback)
            plain: dict[str, Any] = {}
            for name, value in own.items():
                if name in ("params", "_model", "model") or (name in settings and _is_unchanged(settings[name], value)):
                    continue
                value = _without_scalars(value)
                if _is_plain(value):
                    plain[name] = value
                elif _is_arrays(value):
                    plain[name] = {"arrays": len(value)}
                    arrays.update({f"{key}/{name}/{j:05d}": np.array(a) for j, a in enumerate(value)})
            values[key] = plain
        return values, arrays

    def load_state(self, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Restore what `state` returned; a callback that did not exist then keeps its current state."""
        _load_state(self._list, values, arrays)

    def keep(self, run: Storage) -> None:
        """Write the state at the end of a run, for `give_back`; on rank 0."""
        values, arrays = self.state()
        if not values:
            return
        # Keras's own keep weights at most, as EarlyStopping does, and those are in the model.
        of_keras = tuple(_key(i, c) for i, c in enumerate(self._list) if type(c).__module__.startswith("keras."))
        tensors = {name: value for name, value in arrays.items() if not name.startswith(of_keras)}
        run.put(STATE_FILE, codec.encode({**tensors, _VALUES: np.frombuffer(json.dumps(values).encode(), np.uint8)}))

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
        """The learning rate; None where a schedule gives it."""
        optimizer = self._model.optimizer
        inner = getattr(optimizer, "inner_optimizer", optimizer)  # of a LossScaleOptimizer
        scheduled = isinstance(_keras.given_rate(inner), keras.optimizers.schedules.LearningRateSchedule)
        return None if scheduled else float(optimizer.learning_rate)

    def _take_effects(self, stop: bool, rate: float) -> None:
        self._model.stop_training = stop
        if self._group.rank != 0 and self._rate is not None:
            self._model.optimizer.learning_rate = rate

    def _send(self, places: Collection[int]) -> None:
        """Give all ranks the values that variables have on rank 0."""
        if not places:
            return
        changed = [self._variables[place] for place in places]
        arrays = self._group.broadcast([np.asarray(keras.ops.convert_to_numpy(v.value)) for v in changed])
        if self._group.rank != 0:
            for variable, value in zip(changed, arrays, strict=True):
                variable.assign(value)

    @functools.cached_property
    def _variables(self) -> list[keras.Variable]:
        """The variables that hooks may change and that the step reads, in one order on all ranks."""
        return list(variables.variables(self._model).values())


def give_back(run: Storage, callbacks: Sequence[keras.callbacks.Callback], model: keras.Model) -> None:
    """Give the program's callbacks the state that theirs had at the end of a run, and its model.

    Args:
        run: its folder.
        callbacks: that the run was started with.
        model: of the program.
    """
    data = run.get_or_none(STATE_FILE)
    tensors = {} if data is None else codec.decode(data)
    values = json.loads(tensors.pop(_VALUES).tobytes()) if _VALUES in tensors else {}
    own = _without_replaced(callbacks)
    for callback in own:
        callback.set_model(model)
    _load_state(own, values, tensors)


def _without_replaced(callbacks: Sequence[keras.callbacks.Callback]) -> list[keras.callbacks.Callback]:
    return [c for c in callbacks if not isinstance(c, tuple(_REPLACED))]


def _load_state(
    callbacks: Sequence[keras.callbacks.Callback], values: dict[str, Any], arrays: dict[str, np.ndarray]
) -> None:
    for i, callback in enumerate(callbacks):
        key = _key(i, callback)
        if key not in values:
            continue
        own = dict(values[key])
        for name, value in values[key].items():
            if isinstance(value, dict) and set(value) == {"arrays"}:
                names = [f"{key}/{name}/{j:05d}" for j in range(value["arrays"])]
                if set(names) <= arrays.keys():
                    own[name] = [arrays[each] for each in names]
                else:
                    del own[name]
        if hasattr(callback, "set_state"):
            callback.set_state(own)
        else:
            vars(callback).update(own)


def _key(place: int, callback: keras.callbacks.Callback) -> str:
    return f"callback/{place:03d}/{type(callback).__name__}"


def _without_scalars(value: Any) -> Any:
    """The value, with numbers of Python in place of numpy's."""
    if isinstance(value, np.generic):
        return value.item()
    if type(value) in (list, tuple):
        return type(value)(_without_scalars(v) for v in value)
    return {k: _without_scalars(v) for k, v in value.items()} if type(value) is dict else value


def _settings_of(callback: keras.callbacks.Callback) -> dict[str, Any]:
    """The settings of a new callback. Arguments of its constructor are never state, even though Keras changes some (it
    flips the sign of `min_delta`); other values count as state once they differ from their values now."""
    arguments = dict.fromkeys(inspect.signature(type(callback).__init__).parameters, _NEVER)
    return {k: copy.copy(v) for k, v in vars(callback).items() if _is_plain(v)} | arguments


def _drop_rows(logger: keras.callbacks.CSVLogger, epoch: int) -> None:
    """Remove the rows of epochs that will be trained again."""
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


def _is_unchanged(before: Any, now: Any) -> bool:
    """Whether a value is still the setting that it was; an array, which has no single answer to `==`, never is."""
    return before is _NEVER or before is now or (_is_plain(now) and before == now)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (bool, int, float, str, type(None))):
        return True
    if isinstance(value, (list, tuple)):
        return all(_is_plain(v) for v in value)
    return isinstance(value, dict) and all(isinstance(k, str) and _is_plain(v) for k, v in value.items())


def _is_arrays(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(v, np.ndarray) for v in value)
