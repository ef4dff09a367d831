"""Callbacks that survive the loss of rank 0: after each hook all ranks know their state, so another can continue."""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import google_crc32c
import numpy as np

from raytf.checkpoint.training_state import Extras
from raytf.checkpoint.variables import unchanged
from raytf.errors import WorkerLostError
from raytf.training.user.callbacks import BatchHooks, Callbacks

#: How often each hook has run, by activity, name and integer arguments.
Ran = Counter[tuple[Any, ...]]


@dataclass(frozen=True)
class CallbackState:
    """The state of rank 0's callbacks, as known to all ranks.

    Attributes:
        stop, rate: whether training stops, and the learning rate, after the hooks.
        values: values of the variables that the hooks have changed, by index.
        ran: the hooks that have run since the last `begin`.
        logs: logs of the newest complete epoch, including additions by callbacks; None before the first epoch ends.
        extras: the packed `Extras`; None if nothing changed since the last state.
        version: increases with each state that is sent.
    """

    stop: bool = False
    rate: float = 0.0
    values: Mapping[int, np.ndarray] = field(default_factory=dict)
    ran: Ran = field(default_factory=Counter)
    logs: dict[str, Any] | None = None
    extras: bytes | None = None
    version: int = 0


class MovingCallbacks(Callbacks):
    """Callbacks of ranks that can meet again; see `Callbacks`. `pack` packs their files, and returns None if the files
    are too large. `known` and `batches` are the callbacks' state and batch hooks, as known to the other ranks."""

    def __init__(
        self,
        *args: Any,
        pack: Callable[[], dict[str, bytes] | None],
        known: CallbackState | None = None,
        batches: BatchHooks | None = None,
        **kwargs: Any,
    ):
        self._known_batches = batches
        self._pack = pack
        self.known = known or CallbackState()
        #: The current activity and its step. `_ran` counts the hooks that have run at this step, and `_asked` the
        #: requests to run a hook at this step since workers were lost.
        self._what, self._step = "", -1
        self._ran: Ran = Counter()
        self._asked: Ran = Counter()
        #: The mark of the last state that was sent; see `_packed_state`.
        self._mark: Any = None
        #: Indices of variables that hooks have changed on this rank and that the other ranks may not have received.
        self._untold: set[int] = set()
        super().__init__(*args, **kwargs)

    def _agree_on_batches(self, own: BatchHooks) -> BatchHooks:
        # Any batch hook may change its callback's state, which the other ranks must then receive.
        return super()._agree_on_batches(own._replace(steer=own.steer or self.has_batch_hooks))

    @property
    def lacks_hooks(self) -> bool:
        """Return whether this rank has not constructed the callbacks, so that it must take them over as rank 0."""
        return self.active and self._hooks is None

    def begin(self, what: str, step: int) -> None:
        self._what = what
        if step != self._step:
            self._step, self._ran, self._asked = step, Counter(), Counter()
            self.known = replace(self.known, ran=Counter())

    def resume(self) -> None:
        """Restart the current activity after workers were lost, without hooks that have run; all ranks must call it."""
        self._asked.clear()
        if self.active:
            self._mark = None
            self._agree_on_effects(())

    def agree_on_known(self) -> None:
        """Send the newest state that any remaining rank knows to all ranks; all ranks must call this."""
        if not self.active:
            return
        group = self._group
        versions = np.zeros(group.world_size)
        versions[group.rank] = self.known.version
        versions = group.sum(versions)
        giver = int(np.argmax(versions))
        if versions.min() < versions[giver]:
            own = pickle.dumps(self.known) if group.rank == giver else b""
            self.known = pickle.loads(group.share(own, giver))
            if versions[group.rank] < versions[giver]:
                self._assign(self.known.values)

    def take_over(self, files: str, epoch: int, is_inside: bool, has_end: bool) -> None:
        """Continue, on the new rank 0, with the callbacks of the one that was lost.

        Args:
            files: local folder for the callbacks' files, which already contains `packed_files`.
            epoch: the run's current epoch.
            is_inside: whether that epoch has begun.
            has_end: whether the end of the previous epoch is complete.

        Raises:
            WorkerLostError: no remaining rank knows the callbacks' state.
        """
        if self.known.extras is None:
            raise WorkerLostError("rank 0 was lost before its callbacks began")
        extras, stops = Extras.unpack(self.known.extras), self._model.stop_training
        hooks = {hook[1:] for hook in self.known.ran}
        with unchanged(self._variables):  # the hooks run a second time here, which must not change the model again
            # If the end of an epoch runs again, its CSV row is written again, so the old row is dropped.
            self._construct(files, epoch if has_end or ("on_epoch_end", epoch - 1) in hooks else epoch - 1)
            self._catch_up("on_train_begin")
            if is_inside or ("on_epoch_begin", epoch) in hooks:
                self._catch_up("on_epoch_begin", epoch)
            self.load_state(extras.callbacks, extras.arrays)
        self._logs = self.known.logs
        self._model.stop_training = stops
        self._ran = Counter(self.known.ran)

    def _catch_up(self, hook: str, *args: int) -> None:
        self._call(hook, args)

    @property
    def packed_files(self) -> dict[str, bytes]:
        """Return the callbacks' files, as known to all ranks.

        Raises:
            WorkerLostError: no remaining rank has the files.
        """
        files = None if self.known.extras is None else Extras.unpack(self.known.extras).files
        if files is None:
            raise WorkerLostError("rank 0 was lost with files of callbacks that are too large to send to all ranks")
        return files

    def _shared_logs(self) -> dict[str, Any]:
        # Every rank received the logs together with the hook's effects.
        return dict(self.known.logs or {})

    def _is_first(self, hook: str, args: Sequence[Any]) -> bool:
        key = (self._what, hook, *(a for a in args if isinstance(a, int)))
        self._asked[key] += 1
        if self._asked[key] <= self._ran[key]:
            return False
        self._ran[key] += 1
        return True

    def _agree_on_effects(self, changed: Sequence[int]) -> None:
        # One message, so that a rank receives either the whole state or nothing.
        self._untold.update(changed)
        own, mark = self._packed_state(self._untold) if self._group.rank == 0 else (None, None)
        shared: CallbackState = pickle.loads(self._group.share(pickle.dumps(own) if own else b""))
        self._mark = mark
        self._untold.clear()
        self._take_effects(shared.stop, shared.rate)
        self.known = shared if shared.extras is not None else replace(shared, extras=self.known.extras)
        if self._group.rank != 0:
            self._assign(shared.values)

    def _assign(self, values: Mapping[int, np.ndarray]) -> None:
        for place, value in values.items():
            self._variables[place].assign(value)

    def _packed_state(self, changed: Iterable[int]) -> tuple[CallbackState, Any]:
        """Return the state that rank 0 sends, and a mark that differs whenever the extras do."""
        values, arrays = self.state()
        files = self._pack()
        mark = pickle.dumps((values, files)), {name: google_crc32c.value(_bytes(a)) for name, a in arrays.items()}
        extras = None if mark == self._mark else Extras(values, arrays, files).pack()
        new = {place: self._variables[place].numpy() for place in changed}
        stop = bool(self._model.stop_training)
        version = self.known.version + 1
        ran = Counter(self._ran)
        return CallbackState(stop, self._rate or 0.0, new, ran, self._logs, extras, version), mark


def _bytes(array: np.ndarray) -> bytes:
    return np.ascontiguousarray(array).tobytes()
