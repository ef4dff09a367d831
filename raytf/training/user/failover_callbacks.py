"""Callbacks that another rank can continue when rank 0 is lost: after each hook all ranks know their state."""

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

#: Hooks that have run, with their numbers.
Ran = Counter[tuple[Any, ...]]


@dataclass(frozen=True)
class CallbackState:
    """The state of rank 0's callbacks that all ranks know.

    Attributes:
        stop, rate: what the hooks have done: whether training stops, and the learning rate.
        values: by their places, the variables that the hooks have changed.
        ran: hooks since the last `begin`.
        logs: the logs of the newest epoch that has ended, with what callbacks have added to them; None before.
        extras: packed, as of that moment; None where nothing changed.
        version: counts up with each state that was sent.
    """

    stop: bool = False
    rate: float = 0.0
    values: Mapping[int, np.ndarray] = field(default_factory=dict)
    ran: Ran = field(default_factory=Counter)
    logs: dict[str, Any] | None = None
    extras: bytes | None = None
    version: int = 0


class MovingCallbacks(Callbacks):
    """Callbacks of ranks that meet again; see `Callbacks`. `pack` packs their files and returns None if these are too
    large. `known` is the state of the callbacks, and `batches` their batch hooks, as the other ranks know them."""

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
        #: What runs now, and at which step; hooks that have run at this step, and those that were asked for in it since
        #: workers were lost.
        self._what, self._step = "", -1
        self._ran: Ran = Counter()
        self._asked: Ran = Counter()
        #: Of the state that was sent last.
        self._mark: Any = None
        #: Places of the variables that hooks have changed on this rank, and that the others may not have yet.
        self._untold: set[int] = set()
        super().__init__(*args, **kwargs)

    def _agree_on_batches(self, own: BatchHooks) -> BatchHooks:
        # The state of a callback with hooks of batches may change with each of them.
        return super()._agree_on_batches(own._replace(steer=own.steer or self.has_batch_hooks))

    @property
    def lacks_hooks(self) -> bool:
        """Return whether this rank, if it is rank 0, has to take the callbacks over."""
        return self.active and self._hooks is None

    def begin(self, what: str, step: int) -> None:
        self._what = what
        if step != self._step:
            self._step, self._ran, self._asked = step, Counter(), Counter()
            self.known = replace(self.known, ran=Counter())

    def resume(self) -> None:
        """Begin again after workers were lost, without the hooks that have run; all ranks must call this."""
        self._asked.clear()
        if self.active:
            self._mark = None
            self._agree_on_effects(())

    def agree_on_known(self) -> None:
        """Have all ranks know what one of them heard before another one was lost; all ranks must call this."""
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
        """Continue with the callbacks of a rank 0 that is lost, on the new one.

        Args:
            files: local folder for their files, which has those of `packed_files`.
            epoch: in which the run is.
            is_inside: whether that has begun.
            has_end: whether the end of the epoch before it is complete.

        Raises:
            WorkerLostError: what they know is lost.
        """
        if self.known.extras is None:
            raise WorkerLostError("rank 0 is lost before its callbacks began")
        extras, stops = Extras.unpack(self.known.extras), self._model.stop_training
        hooks = {hook[1:] for hook in self.known.ran}
        with unchanged(self._variables):  # what the model is must not depend on how often a callback begins
            # A row of an epoch whose end is run again is written again.
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
        """Return the files of the callbacks, as far as all ranks know them.

        Raises:
            WorkerLostError: nobody else knows them.
        """
        files = None if self.known.extras is None else Extras.unpack(self.known.extras).files
        if files is None:
            raise WorkerLostError("rank 0 is lost, and with it files of callbacks that are too large to be sent around")
        return files

    def _shared_logs(self) -> dict[str, Any]:
        # Every rank heard of them together with the hook's effects.
        return dict(self.known.logs or {})

    def _is_first(self, hook: str, args: Sequence[Any]) -> bool:
        key = (self._what, hook, *(a for a in args if isinstance(a, int)))
        self._asked[key] += 1
        if self._asked[key] <= self._ran[key]:
            return False
        self._ran[key] += 1
        return True

    def _agree_on_effects(self, changed: Sequence[int]) -> None:
        # In one message: a rank knows either all of it or nothing.
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
        """Return what rank 0 sends, and a mark of the state that it sends."""
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
