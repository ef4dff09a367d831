"""The state of a run in a training worker, from which checkpoints are made."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol

import keras

from raytf.checkpoint import variables
from raytf.checkpoint.step_rows import StepRows
from raytf.checkpoint.training_state import Extras, TrainingState
from raytf.runs.run_log import StepLog
from raytf.training.process.reporter import Reporter
from raytf.training.user.callbacks import Callbacks


class Note(Protocol):
    """Records in storage that an attempt has begun.

    Attributes:
        is_described: whether the description of the model is stored, too.
    """

    is_described: bool

    def __call__(self) -> None: ...


@dataclass
class LiveState:
    """The current state of a run on one of its ranks.

    Attributes:
        rank: this worker's rank.
        progress: the progress of the run; the Checkpointer keeps `durable_step` and `best` up to date.
        identity: the identity of the run; a checkpoint with another identity is refused.
        model: the model, whose trainable variables must be finite.
        named: all variables of the state, by name.
        make: returns the source of some variables, given their names.
        callbacks: the user's callbacks.
        log: the log of steps; `renew_log` replaces it.
        reporter: uploads the files of callbacks to storage, and packs them.
        note: records in storage that the attempt has begun; called again with each save, in case storage was not
            available before.
        on_saved: called on rank 0 with the step of each state that is in storage.
    """

    rank: int
    progress: TrainingState
    identity: dict[str, str]
    model: keras.Model
    named: dict[str, keras.Variable]
    make: variables.MakeSource
    callbacks: Callbacks
    log: StepLog
    reporter: Reporter
    note: Note
    on_saved: Callable[[int], None] = lambda step: None

    def must_be_finite(self) -> Collection[str]:
        """Return the names of the variables that must be finite; otherwise a state is not worth keeping."""
        if self.callbacks.batches.take_nan:  # a callback ends the run after such a step, whose state is the last one
            return []
        trainable = {id(v) for v in self.model.trainable_variables}
        return [name for name, v in self.named.items() if id(v) in trainable]

    def extras(self, with_files: bool) -> Extras:
        """Return the values that rank 0 alone knows; empty on the other ranks.

        Args:
            with_files: include the files of callbacks, which `records` uploads to storage.
        """
        values, arrays = self.callbacks.state()
        return Extras(values, arrays, self.reporter.pack_files() if with_files else None)

    def records(self) -> Callable[[], None]:
        """Return a function that stores the files that a checkpoint needs: the attempt, the log and callbacks' files.

        It may be called in any thread.
        """
        log, is_first = self.log, self.rank == 0
        rows = log.take() if is_first else StepRows()

        def write() -> None:
            if is_first:
                self.note()
            log.write(rows)
            self.reporter.upload()

        return write

    def saved(self, step: int) -> None:
        """Note that a checkpoint of a step is complete."""
        if self.rank == 0:  # rank 0 has written the log's rows; the other ranks drop the rows that are in storage
            self.on_saved(step)
        else:
            self.log.forget(step)

    def renew_log(self) -> None:
        """Continue the log under another name, because the rows taken last may still be written late."""
        self.log = self.log.renewed()
