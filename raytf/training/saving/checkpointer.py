"""Copies the state of a run into memory and saves it to storage while the run trains.

All ranks act in lockstep: each transition depends on flags that were summed over the ranks. Rank 0 alone decides when
to save; the other ranks learn it from the flags. A resumed run restores the newest state from either tier.
"""

from __future__ import annotations

import dataclasses
import functools
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from raytf.checkpoint import codec, variables
from raytf.checkpoint.commit import Commit, Event, Votes
from raytf.checkpoint.durable import DurableTier, Keep, PreparedSave
from raytf.checkpoint.manifest import Checkpoint
from raytf.checkpoint.memory import MemorySave, MemoryTier
from raytf.checkpoint.naming import GroupAttempt
from raytf.checkpoint.replicas import Replicas
from raytf.checkpoint.restore import Restorer
from raytf.config.identity import beside
from raytf.distributed.group import Ranks
from raytf.distributed.step_agreement import StepFlag, vector
from raytf.errors import CheckpointError, RunInUseError, RunMismatchError, WorkerLostError, brief
from raytf.runs.lease import check_owner
from raytf.runs.status import SaveTrouble, clock_text
from raytf.storage.storage import Storage
from raytf.training import run_identity
from raytf.training.process.heartbeat import Activity, Heartbeat, WatchedGroup
from raytf.training.process.monitor_client import MonitorClient
from raytf.training.process.reporter import Reporter
from raytf.training.saving.checkpoint_policy import CheckpointPolicy, SaveSchedule, Scored
from raytf.training.saving.live_state import LiveState

if TYPE_CHECKING:
    from raytf.training.session import RankSession

#: Seconds before each try to save the last checkpoint. Any other failed save is followed by a save of a later state.
_LAST_SAVE_PAUSES = (0.0, 1.0, 5.0, 15.0, 30.0)
#: Seconds between two polls of a save that training waits for.
_POLL_SECONDS = 0.02
#: Seconds for which memory keeps the best state while it is saved; slower storage must not block later copies.
_HOLD_SECONDS = 10.0
#: Seconds at the end of a run for deleting old checkpoints.
_RETENTION_SECONDS = 60.0
#: Seconds for the driver to answer whether another group has begun, and to confirm that it knows of a commit.
_ANSWER_SECONDS = 5.0


@dataclass(frozen=True)
class MemoryCopies:
    """Copies a state into the memory tier; every rank must make the same calls.

    Attributes:
        source: the state.
        tier: this rank's memory tier.
        group: all ranks.
        replicas: hashes the weights of each copy, to compare them; None if ranks do not compare their weights.
    """

    source: LiveState
    tier: MemoryTier
    group: Ranks
    replicas: Replicas | None

    def hear(self, unsealed: float) -> None:
        """Commit the newest copy if it is complete on all ranks.

        Args:
            unsealed: number of ranks that reported, in their flags for this call, that their newest copy is not
                complete yet.
        """
        # The flags were sent before a copy of this step was made, so they do not cover it.
        if not unsealed and self.tier.turns.is_pending(self.source.progress.step):
            self.tier.turns.commit()

    def make(self, share_rank_zero: bool) -> None:
        """Copy the current state.

        Args:
            share_rank_zero: first send the state that only rank 0 has (callbacks with their files) to all ranks.
        """
        source, state = self.source, self.source.progress
        self._await_newest()
        if share_rank_zero:
            self.tier.share_rank_zero(source.extras(with_files=True) if self.group.rank == 0 else None)
        document = dataclasses.replace(
            state.document(source.identity, self.group.world_size),
            durable_step=state.durable_step,
            weights_hash=self._hash_weights(),
        )
        rows = source.log.since(-1 if state.durable_step is None else state.durable_step)
        self.tier.begin(MemorySave(state.step, document, rows))

    def make_again(self) -> None:
        """Replace the newest copy, whose weights were wrong."""
        self._await_newest()
        self.tier.abort()
        self.make(False)

    def settle(self) -> None:
        """Wait until the newest copy is complete on all ranks; drop it if a rank failed to complete it."""
        self.tier.settle()
        failed = self.group.sum(np.array([self.tier.has_failed], np.float32))[0]
        if failed and not self.tier.turns.is_settled:
            self.tier.abort()
        else:
            self.tier.turns.commit()

    def _await_newest(self) -> None:
        """Wait until the newest copy is complete on all ranks, if it is of an earlier step."""
        if self.tier.turns.is_pending(self.source.progress.step):
            began = time.perf_counter()
            self.settle()
            self.tier.costs_also(time.perf_counter() - began)

    def _hash_weights(self) -> int | None:
        """Return the hash of this rank's weights, which is stored in the copy; None if ranks do not compare them."""
        if self.replicas is None:
            return None
        began = time.perf_counter()
        self.replicas.hash_weights(self.source.progress.step)
        self.source.log.weigh(self.source.progress.step, self.replicas.newest)
        self.tier.costs_also(time.perf_counter() - began)
        return self.replicas.newest


@dataclass(frozen=True)
class Listener:
    """The receivers of a Checkpointer's reports.

    Attributes:
        reporter: this rank's reporter.
        pulse: this rank's heartbeat, which records that the rank waits for a save.
        logs: returns the metrics of the current epoch so far.
    """

    reporter: Reporter
    pulse: Heartbeat
    logs: Callable[[], dict[str, float]]


class Checkpointer:
    """Copies the state into memory, and saves it to storage, along with the state that has the best value of a metric.

    Args:
        source: the state; its `progress` is kept up to date with what is known to be in storage.
        memory: the memory tier, which holds the copies.
        durable: the durable tier, which holds the saves.
        group: all ranks.
        policy: when to save, and which state is the best.
        listener: the receivers of reports about saves.
        replicas: compares the ranks' weights; None if they are not compared.
        clock: a monotonic clock, in seconds.

    Attributes:
        policy, replicas: as passed.
        stall_seconds: total time for which training stopped to save or copy the state.
    """

    def __init__(
        self,
        source: LiveState,
        memory: MemoryTier,
        durable: DurableTier,
        group: WatchedGroup,
        policy: CheckpointPolicy,
        listener: Listener,
        replicas: Replicas | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._source, self._state = source, source.progress
        self._memory, self._durable = memory, durable
        self._group, self.replicas, self._clock = group, replicas, clock
        self.policy = policy
        self._reporter, self._pulse, self._logs = listener.reporter, listener.pulse, listener.logs
        self._saves: Commit[PreparedSave] = Commit(durable, group.world_size, self._report_failure)
        self._in_memory = MemoryCopies(source, memory, group, replicas)
        split = codec.shares(variables.sizes(source.named), group.world_size)
        self._copies = variables.Copies(source.make(split[group.rank]))
        self._finite = source.must_be_finite()
        self._writers = max(1, sum(map(bool, split)))  # at least rank 0, which may have arrays of callbacks
        self._schedule = SaveSchedule(
            policy.cadence, self._state.step, self._state.durable_step, clock(), random.random
        )
        #: The best state, waiting to be saved after the save under way.
        self._waiting: PreparedSave | None = None
        #: Whether the state of callbacks, which only rank 0 has, may have changed since it was last shared.
        self._callbacks_changed = source.callbacks.active
        self.stall_seconds = 0.0

    def start(self) -> None:
        """Begin to save a state that is newer than storage at once: the next fault may happen before a step ends."""
        if self._state.step > (self._state.durable_step or 0) or self._better() is not None:
            # The previous attempt ended before it could save this state.
            self._saves.begin(self._with_records(self._prepare()))

    def follow(self, before: Checkpointer) -> None:
        """Continue the saves of this rank's previous checkpointer, whose group had other ranks."""
        self._schedule, self.stall_seconds = before._schedule, before.stall_seconds
        before._durable.drop()
        if any(save.document.best != before._state.best for save in before._pending()):
            raise WorkerLostError("a worker was lost while the best state was being saved")

    @property
    def is_saving(self) -> bool:
        return not self._saves.is_idle

    @property
    def may_regroup(self) -> bool:
        """Return whether ranks may regroup by choice: it would lose no save, except one that an outage holds up."""
        return not self._pending() or (self._schedule.outage.failures > 0 and not self._is_best_held())

    def let_go(self) -> bool:
        """Drop saves that an outage holds up, and return whether no save is left. Every rank must call this."""
        if self._schedule.outage.failures and self._pending():
            if any(save.document.best != self._state.best for save in self._pending()):
                self._reporter.say("the best state is dropped: storage is unavailable, and workers join or leave")
            self._durable.drop()
            self._waiting, self._saves = None, Commit(self._durable, self._group.world_size, self._report_failure)
        return not self._pending()

    # -- with each call of the training step ---------------------------------------------------------------------------

    def votes(self, stop: int, step_seconds: float, ends_epoch: bool) -> dict[StepFlag, float]:
        """Return this rank's flags for the call that ends at step `stop`.

        Args:
            step_seconds: duration of a step.
            ends_epoch: whether `stop` is the end of an epoch.
        """
        flags = self.save_votes() | {StepFlag.UNSEALED: float(not self._memory.is_sealed)}
        # While the best state is being saved, memory keeps it, so that a failure does not lose it.
        is_held = self._is_best_held()
        # If the memory of any rank is still empty, all ranks copy.
        flags[StepFlag.COPY] = float(self._memory.is_empty and not is_held)
        if self._group.rank == 0:
            flags[StepFlag.COPY] += 0.0 if is_held else self._memory.wish(stop, step_seconds)
            source = self._source
            flags[StepFlag.SHARE] = (
                self._callbacks_changed or (source.callbacks.active and ends_epoch) or source.callbacks.has_batch_hooks
            )
            flags[StepFlag.WANT_SAVE] = self._saves.is_idle and self._schedule.is_due(
                stop, self._clock(), self._durable.good_seconds, self._waiting is not None
            )
        return flags

    def save_votes(self) -> dict[StepFlag, float]:
        """Return this rank's flags for the save under way."""
        votes = self._saves.votes()
        return {StepFlag.WRITTEN: votes.written, StepFlag.COMMITTED: votes.committed, StepFlag.FAILED: votes.failed}

    def act(self, flags: np.ndarray) -> None:
        """Do what all ranks agreed on after a call, according to the flags summed over all ranks."""
        began = time.perf_counter()
        self._schedule.stepped(self._clock())
        self._compare(flags)
        self._in_memory.hear(float(flags[StepFlag.UNSEALED]))
        if flags[StepFlag.COPY]:
            self._copy(bool(flags[StepFlag.SHARE]))
        self._advance(flags)
        self.stall_seconds += time.perf_counter() - began

    def tell(self) -> int:
        """Return the hash of this rank's weights, to send with its votes; 0 for none."""
        return 0 if self.replicas is None else self.replicas.tell()

    def _compare(self, flags: np.ndarray) -> None:
        """Compare the hashes of the weights that the ranks copied; fix a rank that differs, and copy and save again.

        Raises:
            ReplicaError: it is not clear which ranks are right, or the run is in exact mode.
        """
        replicas = self.replicas
        if replicas is None or not replicas.hear(flags, self._state.step):
            return
        step = replicas.compared_step
        under_way = self._saves.under_way
        if under_way is not None and under_way.step >= step:
            self._saves.give_up()
            self._failed(under_way)
        waiting = self._waiting
        self._waiting = None if waiting is not None and waiting.step >= step else waiting
        self._in_memory.make_again()
        if waiting is not None and waiting.step == self._state.step:
            self._waiting = self._prepare()

    def callbacks_ran(self) -> None:
        """Note that callbacks ran, so their state may have changed."""
        self._callbacks_changed = self._source.callbacks.active

    # -- the best state ------------------------------------------------------------------------------------------------

    def is_best(self) -> bool:
        """Return whether the state at the end of an epoch is the best so far; always False on ranks other than 0."""
        return self._group.rank == 0 and self._better() is not None

    def keep_best(self) -> None:
        """Copy the current state, to be saved as soon as no other save is under way."""
        self._waiting = self._prepare()

    def _better(self) -> Scored:
        return self.policy.better(self._state, [self._state.best, *(s.document.best for s in self._pending())])

    def _pending(self) -> list[PreparedSave]:
        return [save for save in (self._saves.under_way, self._waiting) if save is not None]

    def _is_best_held(self) -> bool:
        pending = [save for save in self._pending() if save.document.best != self._state.best]
        return any(self._clock() - save.made_at < _HOLD_SECONDS for save in pending)

    # -- one save ------------------------------------------------------------------------------------------------------

    def _advance(self, flags: np.ndarray) -> None:
        votes = Votes(
            *(float(flags[f]) for f in (StepFlag.WANT_SAVE, StepFlag.WRITTEN, StepFlag.COMMITTED, StepFlag.FAILED))
        )
        event = self._saves.advance(votes, lambda: self._with_records(self._take_waiting() or self._prepare()))
        save = self._saves.save
        if event is Event.FAILED and save is not None:
            self._failed(save)
        elif event is Event.DONE and save is not None:
            self._done(save)

    def _prepare(self) -> PreparedSave:
        # The copy in memory must never be older than the state in storage.
        self._copy(self._source.callbacks.active)
        extras = self._source.extras(with_files=False)
        own = self._copies.take()
        state, best = self._state, self._better() or self._state.best
        document = state.document(self._source.identity, self._group.world_size)
        return PreparedSave(
            state.step,
            own | extras.arrays,
            dataclasses.replace(document, callbacks=extras.callbacks, best=best),
            self._finite,
            writers=self._writers,
            made_at=self._clock(),
            filling=self._copies.filling,
        )

    def _take_waiting(self) -> PreparedSave | None:
        save, self._waiting = self._waiting, None
        return save

    def _with_records(self, save: PreparedSave) -> PreparedSave:
        """Prepare a save, which becomes the newest one. It completes only after its records are in storage."""
        records = self._source.records()

        def before() -> None:
            save.filling.result()
            records()

        self._schedule.begin(save.step, save.made_at)
        return dataclasses.replace(save, before=before)

    def _done(self, save: PreparedSave) -> None:
        step, state, name = save.step, self._state, self._durable.name
        self._copies.give_back(save.tensors)
        state.durable_step = max(step, state.durable_step or 0)  # a save of an earlier, best state may end later
        state.best = save.document.best
        outage = self._schedule.outage
        if outage.failures:
            lasted = clock_text(self._clock() - outage.since)
            self._reporter.say(f"saving works again: step {step} is in storage, after {lasted}")
            outage.end()
        self._source.saved(step)
        if self._group.rank == 0:
            self._reporter.event("save", name=name, of_step=step)
        with self._pulse.doing(Activity.REPORT):
            self._reporter.report({**self._logs(), "step": state.step}, name)

    def _report_failure(self) -> None:
        assert self._saves.save is not None
        step, failure = self._saves.save.step, self._durable.failure
        if self._group.rank == 0:
            why = "another rank failed" if failure is None else brief(failure)
            self._reporter.event("save_failed", of_step=step, why=why)
        if not self._schedule.outage.failures:
            self._reporter.say(
                f"the checkpoint of step {step} was NOT saved; training continues, the last good checkpoint is kept, "
                "and saving will be tried again"
            )

    def _failed(self, save: PreparedSave) -> None:
        failure = self._durable.failure
        if self._waiting is None and save.document.best != self._state.best:
            self._waiting = save  # unless a better one is waiting already
        if self._durable.lingers:
            self._source.renew_log()
        self._schedule.outage.fail(self._clock(), "another rank failed" if failure is None else brief(failure))

    def _copy(self, share_rank_zero: bool) -> None:
        self._in_memory.make(share_rank_zero)
        self._callbacks_changed = self._callbacks_changed and not share_rank_zero

    # -- saves that training waits for ---------------------------------------------------------------------------------

    def save_now(self, pauses: tuple[float, ...] = (0.0,)) -> bool:
        """Complete the save under way, then save the current state. Return whether the latter is in storage.

        Args:
            pauses: seconds before each try.
        """
        with self._pulse.doing(Activity.SAVE):
            # Copy into memory first: whatever asked for this save may not leave time to complete the one under way.
            self._copy(self._source.callbacks.active)
            self._drain()
            for pause in pauses:
                if self._waiting is None and self._state.durable_step == self._state.step:
                    break
                time.sleep(pause)
                best = self._take_waiting()
                if best is not None:
                    self._save(best)
                if self._state.durable_step != self._state.step:
                    self._save(self._prepare())
            self._in_memory.settle()
            return self._state.durable_step == self._state.step

    def _save(self, save: PreparedSave) -> None:
        self._saves.begin(self._with_records(save))
        self._drain()

    def finish(self) -> None:
        """Save the last state and the best one, in several tries, and delete old checkpoints.

        Raises:
            CheckpointError: the last state could not be saved.
        """
        if not self.save_now(_LAST_SAVE_PAUSES):
            raise CheckpointError(
                f"the last checkpoint, of step {self._state.step}, could not be saved: "
                f"{self._durable.failure or 'another rank failed'}. Fix the storage and start the run again: it "
                f"resumes from step {self._state.durable_step or 0}."
            )
        if self._waiting is not None:
            self._reporter.say(f"the best checkpoint, of step {self._waiting.step}, was NOT saved")
        with self._pulse.doing(Activity.SAVE):
            self._durable.settle(_RETENTION_SECONDS)

    def _drain(self) -> None:
        while not self._saves.is_idle:
            flags = self._group.sum(vector(self.save_votes(), self.tell()))
            self._compare(flags)
            self._advance(flags)
            time.sleep(_POLL_SECONDS)

    def trouble(self) -> SaveTrouble | None:
        """Return the saves that have failed in a row, for the progress line; None if the last save did not fail."""
        outage, now = self._schedule.outage, self._clock()
        return SaveTrouble(now - outage.since, outage.retry_at - now, outage.why) if outage.failures else None


@dataclass(frozen=True)
class Tiers:
    """Both tiers of a run's checkpoints.

    Attributes:
        memory: copies in the memory of the run's nodes.
        durable: checkpoints in storage.
        policy: when to save, and which state is the best.
        restorer: reads the newest state from either tier.
    """

    memory: MemoryTier
    durable: DurableTier
    policy: CheckpointPolicy
    restorer: Restorer


def open_tiers(session: RankSession) -> Tiers:
    """Open this rank's tiers, without reading anything yet."""
    job, checkpoints, reporter, place = session.job, session.config.checkpoints, session.reporter, session.place
    start = GroupAttempt(place.attempt, session.group.rank, session.group.world_size, place.earlier, job.lease)
    memory = MemoryTier(
        job.run_uri,
        session.group,
        start,
        0 if session.config.strategy.has_servers else checkpoints.snapshot_every_steps,
        job.monitor.handle,
        reporter.say_here,
        place.on_node,
    )
    policy = CheckpointPolicy.of(checkpoints)
    durable = DurableTier(
        session.storage,
        start,
        Keep(checkpoints.keep, policy.goal),
        reporter.say_here,
        fence=functools.partial(check_current, session.storage, job.lease, place.attempt, job.monitor),
        late=reporter.upload_anew,
        commits=functools.partial(job.monitor.commits, seconds=_ANSWER_SECONDS),
    )
    restorer = Restorer(memory, durable, session.group, reporter.say, place.void)
    return Tiers(memory, durable, policy, restorer)


def check_current(run: Storage, owner: str, attempt: str, monitor: MonitorClient) -> None:
    """Raise an error unless the run still belongs to its owner, and no other group has replaced the attempt.

    A frozen rank later continues what it had begun, and must not write into folders that the next group has deleted.

    Raises:
        RunInUseError: the run belongs to another owner, or its newest attempt is another one.
        StorageError: the owner of the run cannot be determined.
    """
    check_owner(run, owner)
    if monitor.is_over(attempt, _ANSWER_SECONDS):
        raise RunInUseError(
            f"other workers continue run {run.locate('')}: this worker was suspended or cut off, and writes no more."
        )


def newest(session: RankSession, tiers: Tiers) -> Checkpoint | None:
    """Return the state from which the run resumes, which is the same on every rank; None for a new run.

    Raises:
        RunMismatchError: the run was made with other settings.
        CheckpointError: there are checkpoints, and none of them can be read.
    """
    checkpoint = tiers.restorer.find(functools.partial(_check_identity, session))
    if checkpoint is None and session.place.earlier:
        session.reporter.say("nothing was saved before the run last ended: it starts again at step 0")
    return checkpoint


def _check_identity(session: RankSession, checkpoint: Checkpoint) -> None:
    before, now = checkpoint.document.identity, session.identity
    difference = run_identity.resume_mismatch(before, now)
    if difference:
        raise RunMismatchError(
            f"run {session.config.run_name!r} in storage was made with other settings: {difference}. "
            f"Use the same settings as before. {beside(session.config)}"
        )
    if before.get(run_identity.CODE, now[run_identity.CODE]) != now[run_identity.CODE]:
        session.reporter.say(
            "the code of the model, of its loss or of a layer has changed: the run continues with the new code"
        )


def restore(session: RankSession, chosen: Checkpoint) -> None:
    """Restore the model, its optimizer, and the program's variables from a checkpoint."""
    own = {name: value for name, value in chosen.tensors.items() if not name.startswith("callback/")}
    # Earlier versions saved no variables of the program, which then keep the program's own values.
    new = [name for name in session.named if name.startswith(variables.PROGRAM_PREFIX) and name not in own]
    variables.restore({name: v for name, v in session.named.items() if name not in new}, own)
