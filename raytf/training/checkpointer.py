"""How the state of a run gets into memory and onto storage while it trains.

All ranks go through it in step: each transition is taken on flags that were added over the ranks. Rank 0 alone decides
when; the others learn it by the flags.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from raytf.checkpoint import cadence, codec, commit, variables
from raytf.checkpoint.durable import Saver
from raytf.checkpoint.replicas import Replicas
from raytf.checkpoint.snapshots import Snapshots
from raytf.checkpoint.training_state import TrainingState
from raytf.config.objective import Goal
from raytf.config.sections import CheckpointSection
from raytf.distributed.step_flags import Flag, vector
from raytf.errors import CheckpointError, ConfigError, brief
from raytf.runs.run_log import StepLog
from raytf.runs.status import SaveTrouble, clock_text
from raytf.training.callbacks import Callbacks
from raytf.training.heartbeat import Activity, Pulse, WatchedGroup
from raytf.training.reporter import Reporter

#: Seconds before each try to save the last checkpoint; the others simply come again with the next one.
_LAST_SAVE_PAUSES = (0.0, 1.0, 5.0, 15.0, 30.0)
#: Seconds between two looks at a save that training waits for.
_LOOK_SECONDS = 0.02
#: Seconds for which memory keeps the best state while it is saved; a store that is slower must not cost later steps.
_HOLD_SECONDS = 10.0
#: Seconds at the end of a run in which old checkpoints are deleted.
_RETENTION_SECONDS = 60.0


@dataclass(frozen=True)
class _Prepared:
    """A copy of the state, to be saved now or later.

    Attributes:
        best: what `TrainingState.best` is once it is on storage.
        filling: ends when the tensors have their values.
        writers: ranks that have tensors, the first ones.
        made_at: seconds of a clock that only goes forward.
    """

    made_at: float
    step: int
    tensors: dict[str, np.ndarray]
    filling: Future[None]
    document: dict[str, Any]
    best: tuple[str, float] | None
    writers: int


class Saving:
    """Copies of the state into memory, saves of it on storage, and of the one with the best value of a metric.

    Args:
        config: of checkpoints.
        goal: that of `--keep-best`; None where there is none.
        group: of all ranks.
        pulse: told what the rank waits for.
        reporter: the rank's voice.
        state: where the run is; `durable_step` and `best` are kept up to date here. Where it is newer than what is on
            storage, it is saved at once.
        model: for the names of what must be finite.
        named: all variables of the state.
        identity: of the run; a checkpoint of another one is refused.
        callbacks: whose state is saved too.
        log: of steps.
        snapshots: in memory.
        saver: of this rank.
        note: writes down the attempt; comes again with each save, should storage have been away.
        logs: the metrics of the present epoch so far.
        make: the source of some of the state's tensors.
        clock: seconds, of one that only goes forward.
        replicas: compares the ranks' weights; None where there is one rank.

    Attributes:
        log: as given, or one that goes on with it.
        stall_seconds: for which training stood still to save or copy the state.
    """

    def __init__(
        self,
        config: CheckpointSection,
        goal: Goal | None,
        group: WatchedGroup,
        pulse: Pulse,
        reporter: Reporter,
        state: TrainingState,
        model: keras.Model,
        named: dict[str, keras.Variable],
        identity: dict[str, str],
        callbacks: Callbacks,
        log: StepLog,
        snapshots: Snapshots,
        saver: Saver,
        note: Callable[[], None],
        logs: Callable[[], dict[str, float]],
        make: variables.MakeSource,
        clock: Callable[[], float] = time.monotonic,
        replicas: Replicas | None = None,
    ):
        self._goal, self._group, self._pulse, self._reporter = goal, group, pulse, reporter
        self._state, self._named, self._identity = state, named, identity
        self._callbacks, self.log, self._snapshots, self._saver = callbacks, log, snapshots, saver
        self._note, self._logs, self._clock, self._replicas = note, logs, clock, replicas
        trainable = {id(v) for v in model.trainable_variables}
        self._finite = [name for name, v in named.items() if id(v) in trainable]
        split = codec.shares(variables.sizes(named), group.world_size)
        self._copies = variables.Copies(make(split[group.rank]))
        self._writers = max(1, sum(map(bool, split)))  # rank 0 may have arrays of callbacks
        self.cadence = cadence.Cadence.of(config.checkpoint_every_steps, config.checkpoint_every_seconds)
        self._outage = cadence.Outage(random.random, self.cadence.most_pause)
        #: The newest state that is on storage, or on its way there: its step, and when the run was in it.
        self._saved_step, self._saved_at = state.durable_step, self._clock()
        self._restarted_at = self._saved_at if state.step else None
        self._has_stepped = False
        #: Step of the latest copy, and whether it is known to count on all ranks.
        self._copied_step, self._is_copy_sealed = -1, True
        #: The save under way, or the last one; and one of an earlier state, that with the best value, which comes next.
        self._current: _Prepared | None = None
        self._waiting: _Prepared | None = None
        #: Whether rank 0 may know something new that is not a function of the step: the state of callbacks.
        self._is_news = callbacks.active
        self.stall_seconds = 0.0
        if state.step > (state.durable_step or 0) or self._is_best(self._value()):
            # The attempt before this one did not come to save it. At once: the next fault may come before a step ends.
            self._begin(self._prepare())
            self._saver.phase = commit.Phase.WRITING

    # -- with each call of the training step ---------------------------------------------------------------------------

    def votes(self, stop: int, step_seconds: float, ends_epoch: bool) -> dict[Flag, float]:
        """This rank's flags for the call that ends at step `stop`, when a step takes `step_seconds`."""
        flags = self._save_votes() | {Flag.UNSEALED: float(not self._snapshots.is_sealed)}
        # While the best state is on its way to storage, memory keeps it: a failure must not lose it.
        is_held = self._is_best_held()
        # A rank whose memory holds nothing yet has all of them copy.
        flags[Flag.COPY] = float(self._snapshots.is_empty and not is_held)
        if self._group.rank == 0:
            flags[Flag.COPY] += 0.0 if is_held else self._snapshots.wish(stop, step_seconds)
            callbacks = self._callbacks
            flags[Flag.SHARE] = self._is_news or (callbacks.active and ends_epoch) or callbacks.has_batch_hooks
            idle, now = self._saver.phase is commit.Phase.IDLE, self._clock()
            flags[Flag.WANT_SAVE] = idle and self._outage.allows(
                now, self._waiting is not None or self._is_due(stop, now)
            )
        return flags

    def _is_due(self, stop: int, now: float) -> bool:
        saved_at = now if self._saved_step is None and not self._has_stepped else self._saved_at
        return self.cadence.is_due(stop, now, self._saved_step, saved_at, self._restarted_at, self._saver.good_seconds)

    def act(self, flags: np.ndarray) -> None:
        """Do what all ranks agreed on after a call, given the flags added over them."""
        began = time.perf_counter()
        if not self._has_stepped:
            self._has_stepped = True
            if self._saved_step is None:
                self._saved_at = self._clock()  # the first steps took as long as they are traced
        self._compare(flags)
        if self._copied_step != self._state.step:  # one of this step was made after the votes
            self._is_copy_sealed |= not flags[Flag.UNSEALED]
        if flags[Flag.COPY]:
            self._copy(bool(flags[Flag.SHARE]))
        self._advance(flags)
        self.stall_seconds += time.perf_counter() - began

    def tell(self) -> int:
        """The hash of this rank's weights, to be told with its votes; 0 for none."""
        return 0 if self._replicas is None else self._replicas.tell()

    def _compare(self, flags: np.ndarray) -> None:
        """Whether all ranks copied the same weights; mends those of a rank that did not.

        Raises:
            ReplicaError: nobody can say who is right, or the run promises its last bits.
        """
        replicas = self._replicas
        if replicas is None or not replicas.hear(flags, self._state.step):
            return
        step = replicas.told
        if self._saver.phase is not commit.Phase.IDLE and self._current is not None and self._current.step >= step:
            self._saver.phase = commit.Phase.IDLE
            self._failed()
        waiting = self._waiting
        self._waiting = None if waiting is not None and waiting.step >= step else waiting
        self._snapshots.distrust()
        self._copy(False)
        if waiting is not None and waiting.step == self._state.step:
            self._waiting = self._prepare()

    def callbacks_ran(self) -> None:
        """Rank 0 may know something new from its callbacks."""
        self._is_news = self._callbacks.active

    # -- the best state ------------------------------------------------------------------------------------------------

    def check_goal(self, logs: dict[str, float]) -> None:
        """Whether the metric of `--keep-best` is among those of an epoch.

        Raises:
            ConfigError: it is not.
        """
        if self._goal is None or self._goal.metric in logs:
            return
        if any(name.startswith("val_") for name in logs) or not self._goal.metric.startswith("val_"):
            raise ConfigError(
                f"--keep-best {self._goal.metric}: there is no such metric. Expected one of {', '.join(logs)}."
            )

    def is_best(self) -> bool:
        """Whether the state, at the end of an epoch, is to be kept for its metric; rank 0 knows."""
        return self._group.rank == 0 and self._is_best(self._value())

    def keep_best(self) -> None:
        """Have the present state saved, as soon as no other save is under way."""
        self._waiting = self._prepare()

    def _value(self) -> float | None:
        return None if self._goal is None else self._goal.value_at(self._state.step, self._state.history)

    def _is_best(self, value: float | None) -> bool:
        """Whether a value is better than all that are on storage, or on their way there."""
        if self._goal is None:
            return False
        under_way = self._current if self._saver.phase is not commit.Phase.IDLE else None
        rivals = [self._state.best, *(save.best for save in (under_way, self._waiting) if save is not None)]
        values = [rival[1] for rival in rivals if rival is not None and rival[0] == self._goal.metric]
        return value is not None and all(self._goal.is_better(value, other) for other in values)

    def _is_best_held(self) -> bool:
        under_way = self._current if self._saver.phase is not commit.Phase.IDLE else None
        pending = [save for save in (self._waiting, under_way) if save is not None and save.best != self._state.best]
        return any(self._clock() - save.made_at < _HOLD_SECONDS for save in pending)

    # -- one save ------------------------------------------------------------------------------------------------------

    def _save_votes(self) -> dict[Flag, float]:
        votes = self._saver.votes()
        return {Flag.WRITTEN: votes.written, Flag.COMMITTED: votes.committed, Flag.FAILED: votes.failed}

    def _advance(self, flags: np.ndarray) -> None:
        votes = commit.Votes(*(float(flags[f]) for f in (Flag.WANT_SAVE, Flag.WRITTEN, Flag.COMMITTED, Flag.FAILED)))
        self._saver.phase, event = commit.advance(self._saver.phase, votes, self._group.world_size)
        if event is commit.Event.BEGIN:
            self._begin(self._take_waiting() or self._prepare())
        elif event is commit.Event.COMMIT:
            self._saver.commit()
        elif event is commit.Event.FAILED:
            self._failed()
        elif event is commit.Event.DONE:
            self._done()

    def _prepare(self) -> _Prepared:
        """A copy of the present state."""
        # So that what is in memory is never older than what is on storage.
        self._copy(self._callbacks.active)
        values, arrays = self._callbacks.state()
        own = self._copies.take()
        state, value = self._state, self._value()
        best = (self._goal.metric, value) if self._goal and value is not None and self._is_best(value) else state.best
        document = {
            **state.totals(),
            "identity": self._identity,
            "history": list(state.history),
            "callbacks": values,
            "world_size": self._group.world_size,
            "best": best,
        }
        return _Prepared(self._clock(), state.step, own | arrays, self._copies.filling, document, best, self._writers)

    def _take_waiting(self) -> _Prepared | None:
        save, self._waiting = self._waiting, None
        return save

    def _begin(self, save: _Prepared) -> None:
        log = self.log
        rows = log.take() if self._group.rank == 0 else np.empty((0, 4))

        def first() -> None:
            save.filling.result()
            if self._group.rank == 0:
                self._note()
            log.write(rows)
            self._reporter.upload()

        self._saver.begin(save.step, save.tensors, save.document, self._finite, first, save.writers)
        self._current = save
        self._saved_step, self._saved_at = save.step, save.made_at

    def _done(self) -> None:
        assert self._current is not None
        step, state = self._current.step, self._state
        self._saver.done()
        self._copies.give_back(self._current.tensors)
        state.durable_step = max(step, state.durable_step or 0)  # the best of earlier steps may come late
        state.best = self._current.best
        if self._outage.failures:
            lasted = clock_text(self._clock() - self._outage.since)
            self._reporter.say(f"saving works again: step {step} is on storage, after {lasted}")
            self._outage.end()
        if self._group.rank != 0:
            self.log.forget(step)
        if self._group.rank == 0:
            self._reporter.event("save", name=self._saver.name, of_step=step)
        with self._pulse.doing(Activity.REPORT):
            self._reporter.report({**self._logs(), "step": state.step}, self._saver.name)

    def _failed(self) -> None:
        assert self._current is not None
        step, failure = self._current.step, self._saver.failure
        if self._group.rank == 0:
            why = "another rank failed" if failure is None else brief(failure)
            self._reporter.event("save_failed", of_step=step, why=why)
        if not self._outage.failures:
            self._reporter.say(
                f"the checkpoint of step {step} was NOT saved; training goes on, the last good one stays, and saving "
                "is tried again"
            )
        if self._waiting is None and self._current.best != self._state.best:
            self._waiting = self._current  # where a better one waits, that is enough
        if self._saver.drop():
            self.log = self.log.renewed()  # the old one may still be written
        self._outage.fail(self._clock(), "another worker's part" if failure is None else brief(failure))

    def _copy(self, share_rank_zero: bool) -> None:
        """Copy the present state into the memory of this rank's node; every rank does at the same step."""
        state, callbacks = self._state, self._callbacks
        if not self._is_copy_sealed and self._copied_step != state.step:
            # A rank that gave up its older copy while the newer one of another does not count yet would leave none.
            began = time.perf_counter()
            self._settle()
            self._snapshots.costs_also(time.perf_counter() - began)
        self._copied_step, self._is_copy_sealed = state.step, False
        if share_rank_zero:
            own = (*callbacks.state(), self._reporter.pack_files()) if self._group.rank == 0 else None
            self._snapshots.share_rank_zero(own)
            self._is_news = False
        live = state.totals() | {"durable_step": state.durable_step, "world_size": self._group.world_size}
        if self._replicas is not None:
            began = time.perf_counter()
            self._replicas.look(state.step)
            self._snapshots.costs_also(time.perf_counter() - began)
            live["weights_hash"] = self._replicas.newest
        self._snapshots.copy(
            state.step,
            live,
            len(state.history),
            lambda: {"identity": self._identity, "history": state.history},
            self.log.since(-1 if state.durable_step is None else state.durable_step),
        )

    def _settle(self) -> None:
        """Wait until the newest copy counts on all ranks."""
        self._snapshots.settle()
        self._group.sum(np.zeros(1, np.float32))
        self._is_copy_sealed = True

    # -- saves that training waits for ---------------------------------------------------------------------------------

    def save_now(self, pauses: tuple[float, ...] = (0.0,)) -> bool:
        """Bring the save under way to its end, and save the present state too; whether it is on storage then.

        Args:
            pauses: seconds before each try.
        """
        with self._pulse.doing(Activity.SAVE):
            # The save under way may take its time, and what asks for this one may not.
            self._copy(self._callbacks.active)
            self._drain()
            for pause in pauses:
                if self._is_saved():
                    break
                time.sleep(pause)
                best = self._take_waiting()
                if best is not None:
                    self._save(best)
                if self._state.durable_step != self._state.step:
                    self._save(self._prepare())
            self._settle()
            return self._state.durable_step == self._state.step

    def _is_saved(self) -> bool:
        return self._waiting is None and self._state.durable_step == self._state.step

    def _save(self, save: _Prepared) -> None:
        self._begin(save)
        self._saver.phase = commit.Phase.WRITING
        self._drain()

    def finish(self) -> None:
        """Have the last state and the best one on storage, whatever it takes, and old ones deleted.

        Raises:
            CheckpointError: storage did not take it.
        """
        if not self.save_now(_LAST_SAVE_PAUSES):
            raise CheckpointError(
                f"the last checkpoint, of step {self._state.step}, could not be saved: "
                f"{self._saver.failure or 'another rank failed'}. Mend the storage and run the same command: it goes "
                f"on from step {self._state.durable_step or 0}."
            )
        if self._waiting is not None:
            self._reporter.say(f"the checkpoint of step {self._waiting.step}, the best one, was NOT saved")
        with self._pulse.doing(Activity.SAVE):
            self._saver.settle(_RETENTION_SECONDS)

    def _drain(self) -> None:
        while self._saver.phase is not commit.Phase.IDLE:
            flags = self._group.sum(vector(self._save_votes(), self.tell()))
            self._compare(flags)
            self._advance(flags)
            time.sleep(_LOOK_SECONDS)

    def trouble(self) -> SaveTrouble | None:
        """Saves that failed in a row, for the progress line; None where all is well."""
        outage, now = self._outage, self._clock()
        return SaveTrouble(now - outage.since, outage.retry_at - now, outage.why) if outage.failures else None
