"""The checkpoint with the best value stays, however long saves take, and also where a failure comes between."""

from __future__ import annotations

import functools
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import keras
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raytf.checkpoint import manifest, naming, variables
from raytf.checkpoint.commit import Phase, Votes
from raytf.checkpoint.durable import DurableTier, Keep
from raytf.checkpoint.memory import MemorySave
from raytf.checkpoint.naming import GroupAttempt
from raytf.checkpoint.slot_ledger import CopyTurns
from raytf.checkpoint.training_state import TrainingState
from raytf.config.objective import MetricObjective
from raytf.distributed.step_agreement import StepFlag, vector
from raytf.errors import ConfigError, StorageError
from raytf.runs.run_log import StepLog
from raytf.storage.storage import Storage
from raytf.training.saving.checkpoint_policy import YOUNG_SECONDS, Cadence, CheckpointPolicy
from raytf.training.saving.checkpointer import Checkpointer, Listener
from raytf.training.saving.live_state import LiveState
from raytf.training.user.callbacks import Callbacks
from tests.tf.ranks import Alone

ATTEMPT = "20260101T000000.000-aaaaaa"
GOAL = MetricObjective("val_loss", is_largest=False)


class Memory:
    """In the place of the memory tier, which needs Ray: which steps were copied."""

    def __init__(self):
        self.copied: list[int] = []
        self.turns = CopyTurns()
        self.is_sealed, self.has_failed, self.is_empty = True, False, False
        self.settled = self.waits = 0

    def wish(self, stop: int, step_seconds: float) -> float:
        return 1.0

    def begin(self, save: MemorySave) -> None:
        self.copied.append(save.step)
        self.turns.ask(save.step)

    def settle(self) -> None:
        self.settled += 1

    def costs_also(self, seconds: float) -> None:
        self.waits += 1


class SlowTier(DurableTier):
    """Takes `calls` calls of the training step for a save, which may fail."""

    calls = left = 0
    fails = False

    def begin(self, save) -> None:
        def refuse() -> None:
            raise StorageError("storage is away", "unreachable")

        self.left = self.calls
        super().begin(replace(save, before=refuse) if self.fails else save)

    def vote(self, phase: Phase) -> Votes:
        if self._writer is not None and phase is not Phase.IDLE:
            if self.left:
                self.left -= 1
                return Votes()
            self._job.exception(60)
        return super().vote(phase)


class Run:
    """One rank that trains an epoch with each call, without Ray."""

    def __init__(self, folder: str, state: TrainingState | None = None, calls: int = 0):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        self.storage, self.state, self.memory = Storage(folder), state or TrainingState(), Memory()
        self.tier = SlowTier(self.storage, GroupAttempt(ATTEMPT), Keep(1, GOAL), print)
        self.tier.calls = calls
        self.now = 0.0
        nothing = lambda *_, **__: None  # noqa: E731
        pulse = SimpleNamespace(doing=lambda activity: nullcontext())
        reporter = SimpleNamespace(say=print, event=nothing, report=nothing, upload=nothing, pack_files=nothing)
        named = variables.variables(model)
        source = LiveState(
            0,
            self.state,
            {},
            model,
            named,
            functools.partial(variables.Variables, named),
            Callbacks(None, model, Alone(), print, "", {}, None),
            StepLog(self.storage, ATTEMPT),
            reporter,
            nothing,
        )
        policy, listener = CheckpointPolicy(Cadence(1_000_000, None), GOAL), Listener(reporter, pulse, dict)
        clock = lambda: self.now  # noqa: E731
        self.saving = Checkpointer(source, self.memory, self.tier, Alone(), policy, listener, clock=clock)
        self.saving.start()

    def epoch(self, value: float, saved: bool = False) -> None:
        """One call of one step, which ends an epoch with a value; `saved`: it is time for a checkpoint."""
        self.now += 3
        flags = vector(self.saving.votes(self.state.step + 1, 0.1, True))
        if saved and not self.saving.is_saving:
            flags[StepFlag.WANT_SAVE] = 1
        self.state.step += 1
        logs = {"val_loss": value}
        self.state.history.append({"step": self.state.step, **logs})
        self.saving.policy.check_goal(logs)
        if self.saving.is_best():
            self.saving.keep_best()
        self.saving.act(flags)

    @property
    def kept(self) -> list[int]:
        return [naming.split_name(name)[0] for name in manifest.list_complete(self.storage)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5).map(float), st.integers(0, 3), st.booleans(), st.booleans()),
        min_size=1,
        max_size=12,
    )
)
def test_the_best_of_all_epochs_stays(epochs):
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        for value, calls, saved, fails in epochs:
            run.tier.calls, run.tier.fails = calls, fails
            run.epoch(value, saved)
        run.tier.left, run.tier.fails = 0, False
        run.saving.finish()
        values = [epoch[0] for epoch in epochs]
        best = values.index(min(values)) + 1
        assert set(run.kept) == {best, len(values)}
        assert (run.state.best, run.state.durable_step) == (("val_loss", min(values)), len(values))


def test_memory_keeps_the_best_state_until_storage_has_it():
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        run.tier.calls = 100
        run.epoch(2.0)
        run.epoch(3.0)
        run.epoch(4.0)
        assert set(run.memory.copied) == {1}
        for _ in range(4):
            run.epoch(5.0)
        assert set(run.memory.copied) > {1}  # not for ever
        # The worker dies here; the next attempt restores step 1 from memory, and saves it.
        state = TrainingState(step=1, history=[{"step": 1, "val_loss": 2.0}])
        again = Run(folder, state)
        again.epoch(5.0)
        again.epoch(6.0)
        again.saving.finish()
        assert again.kept == [3, 1]
        assert again.memory.copied[-1] == 3


def test_a_state_that_storage_lacks_is_saved_before_the_first_step(tmp_path):
    def train(run: Run) -> None:
        for _ in range(3):  # all have written, the manifest is there, all know it
            run.epoch(3.0)

    first = Run(str(tmp_path))
    first.epoch(3.0)
    assert not first.kept
    train(first)
    assert first.kept == [1], "the state of the first step has the best value so far"
    # The group dies at step 7, of which memory has all.
    again = Run(str(tmp_path), TrainingState(step=7, durable_step=1, best=("val_loss", 3.0)))
    assert again.saving.is_saving
    train(again)
    assert again.kept[0] == again.state.durable_step == 7
    # It dies at once; storage has all that memory has, and nothing is written.
    third = Run(str(tmp_path), TrainingState(step=7, durable_step=7, best=("val_loss", 3.0)))
    assert not third.saving.is_saving
    assert not third.saving.votes(8, 0.1, False)[StepFlag.WANT_SAVE]
    third.now += YOUNG_SECONDS
    assert third.saving.votes(8, 0.1, False)[StepFlag.WANT_SAVE]


def test_the_cadence_counts_from_the_state_and_not_from_a_late_save(tmp_path):
    run = Run(str(tmp_path))
    run.tier.calls = 5
    run.epoch(9.0)
    run.epoch(9.0)
    run.epoch(8.0)  # the best so far, which waits until the first save has ended
    made_at = run.now
    while naming.split_name(run.tier.name)[0] != 3:
        run.epoch(10.0)
    assert run.saving._schedule._saved_at == made_at < run.now
    run.saving.finish()


def test_ranks_may_meet_again_while_storage_is_out_and_the_best_state_waits(tmp_path):
    """Otherwise nobody could join, and no node with notice could leave, for as long as the outage lasts."""
    run = Run(str(tmp_path))
    run.epoch(9.0)
    assert not run.saving.may_regroup
    assert not run.saving.let_go()  # it is being saved
    run.tier.fails = True
    for _ in range(2):  # the save fails; memory still holds the best state
        run.epoch(9.0)
    assert not run.saving.may_regroup
    while not run.saving.may_regroup:
        assert run.now < 60
        run.epoch(9.0)
    assert run.saving.let_go()
    other = Run(str(tmp_path), run.state)
    other.saving.follow(run.saving)
    other.now, other.tier.fails = run.now, False
    for _ in range(60):
        other.epoch(9.0)
    assert other.state.best == ("val_loss", 9.0)
    assert other.state.durable_step is not None


def test_ranks_that_meet_again_leave_no_state_that_can_be_saved(tmp_path):
    run = Run(str(tmp_path))
    run.epoch(9.0)
    while not run.saving.may_regroup:
        run.epoch(9.0)
    assert run.saving.let_go()
    assert run.kept == [1]


def test_a_copy_waits_until_the_one_before_counts_on_all_ranks():
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        run.epoch(2.0)
        assert run.memory.copied == [1, 1]  # the best one, and that of the step
        assert run.memory.settled == 0
        for unsealed, settled in ((0, 0), (1, 1), (1, 2), (0, 2)):
            run.state.step += 1
            run.saving.act(vector({StepFlag.COPY: 1, StepFlag.UNSEALED: unsealed}))
            assert run.memory.settled == settled


def test_ranks_tell_whether_their_copy_counts():
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        assert run.saving.votes(1, 0.1, False)[StepFlag.UNSEALED] == 0
        run.memory.is_sealed = False
        assert run.saving.votes(1, 0.1, False)[StepFlag.UNSEALED] == 1


def test_a_metric_that_there_is_not():
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        run.saving.policy.check_goal({"loss": 1.0})  # an epoch without validation
        with pytest.raises(
            ConfigError, match=r"--keep-best val_loss: there is no such metric. Expected one of loss, val_f1"
        ):
            run.saving.policy.check_goal({"loss": 1.0, "val_f1": 1.0})
