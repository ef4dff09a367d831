"""One of several processes that train, copy and save their state, in one of which a bit of a weight is flipped once.

    python -m tests.tf.replica_worker JSON      prints JSON; see `Orders`

A real group of MultiWorkerMirroredStrategy, and raytf's own Checkpointer, DurableTier and Replicas. Memory tier and
driver, which are Ray's, are not there.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Orders:
    """What a process is to do.

    Attributes:
        addresses: of all ranks.
        folder: those of the runs are in it.
        runs: one after another: the rank in whose weights a bit flips after step 6, or None; and whether the run
            promises its last bits.
    """

    addresses: list[str]
    rank: int
    folder: str
    runs: list[tuple[int | None, bool]]


#: Steps of a run, that of the flip, and those after which the state is saved.
STEPS, FLIP, SAVES = 12, 6, (2, 6)
ATTEMPT = "20260101T000000.000-aaaaaa"


class Memory:
    """In the place of the memory tier: which steps were copied, and that the newest is trusted no more."""

    def __init__(self) -> None:
        from raytf.checkpoint.slot_ledger import CopyTurns

        self.copied: list[Any] = []
        self.turns = CopyTurns()
        self.is_sealed, self.has_failed, self.is_empty = True, False, False

    def wish(self, stop: int, step_seconds: float) -> float:
        return 1.0

    def begin(self, save: Any) -> None:
        self.copied.append(save.step)
        self.turns.ask(save.step)

    def abort(self) -> None:
        self.copied.append("distrust")
        self.turns.abort()

    def costs_also(self, seconds: float) -> None:
        assert seconds > 0

    def settle(self) -> None:
        pass


class Rank:
    """Model, group and what saves; of one run."""

    def __init__(self, rank: int, group: Any, folder: str, exact: bool):
        import keras

        from raytf.checkpoint import variables
        from raytf.checkpoint.durable import DurableTier, Keep
        from raytf.checkpoint.naming import GroupAttempt
        from raytf.checkpoint.replicas import Digest, Replicas
        from raytf.checkpoint.training_state import TrainingState
        from raytf.storage.storage import Storage

        self.rank, self.group = rank, group
        keras.utils.set_random_seed(0)
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5), keras.layers.Dense(1)])
        self.model.compile(keras.optimizers.Adam(0.1), "mse")
        self.model.optimizer.build(self.model.trainable_variables)
        self.named = variables.variables(self.model)
        self.digest = Digest([v.value for name, v in self.named.items() if name.startswith("model/")])
        self.said: list[str] = []
        self.events: list[dict[str, Any]] = []
        self.storage, self.state, self.memory = Storage(folder), TrainingState(), Memory()
        attempt = GroupAttempt(ATTEMPT, rank, self.group.world_size)
        self.durable = DurableTier(self.storage, attempt, Keep(9), self.said.append)
        self.replicas = Replicas(
            self.group,
            self.named,
            self.digest.value,
            exact,
            self.said.append,
            lambda kind, **fields: self.events.append({"kind": kind, **fields}),
            lambda: f"host {rank}, CPU:0",
        )
        self.saving = self._saving()

    def _saving(self) -> Any:
        from raytf.checkpoint import variables
        from raytf.runs.run_log import StepLog
        from raytf.training.saving.checkpoint_policy import Cadence, CheckpointPolicy
        from raytf.training.saving.checkpointer import Checkpointer, Listener
        from raytf.training.saving.live_state import LiveState
        from raytf.training.user.callbacks import Callbacks

        nothing = lambda *_, **__: None  # noqa: E731
        pulse: Any = SimpleNamespace(doing=lambda activity: nullcontext())
        say = self.said.append
        reporter: Any = SimpleNamespace(say=say, event=nothing, report=nothing, upload=nothing, pack_files=nothing)
        group: Any = self.group
        source = LiveState(
            self.rank,
            self.state,
            {},
            self.model,
            self.named,
            functools.partial(variables.Variables, self.named),
            Callbacks(None, self.model, group, print, "", {}, None),
            StepLog(self.storage, f"{ATTEMPT[:-1]}{self.rank}"),
            reporter,
            nothing,
        )
        memory: Any = self.memory
        policy, listener = CheckpointPolicy(Cadence(1_000_000, None)), Listener(reporter, pulse, dict)
        saving = Checkpointer(source, memory, self.durable, group, policy, listener, self.replicas)
        saving.start()
        return saving

    def train(self, flips: bool) -> None:
        from raytf.distributed.step_agreement import StepFlag, vector

        while self.state.step < STEPS:
            stop = self.state.step + 1
            votes = self.saving.votes(stop, 0.1, False) | {StepFlag.WANT_SAVE: 0.0}
            told = self.group.sum(vector(votes, self.saving.tell()))
            self._update()
            self.state.step = stop
            if flips and stop == FLIP:
                self._flip()
            if stop in SAVES and not self.saving.is_saving:
                told[StepFlag.WANT_SAVE] = 1
            self.saving.act(told)
            # A save is to end within a step or two; what it waits for is the disk.
            deadline = time.monotonic() + 60
            while not self.durable._job.done() and self.durable.name and time.monotonic() < deadline:
                time.sleep(0.005)

    def _update(self) -> None:
        import tensorflow as tf

        x = tf.constant(np.random.default_rng(self.state.step).standard_normal((4, 3)), tf.float32)
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(self.model(x) ** 2)
        weights = self.model.trainable_variables
        found = tape.gradient(loss, [w.value for w in weights])
        # Of one rank, so that the number of ranks changes nothing; if its weights are wrong, all ranks' updates are.
        gradients = [self.group.sum(g.numpy() if self.rank == 0 else np.zeros_like(g)) for g in found]
        self.model.optimizer.apply([tf.constant(g) for g in gradients], weights)

    def _flip(self) -> None:
        weight = self.model.trainable_variables[0]
        values = np.array(weight.value)
        values.reshape(-1).view(np.uint32)[2] ^= np.uint32(1 << 12)
        weight.assign(values)

    def go_back(self) -> None:
        """As the next group of workers does, which restores the newest state that counts."""
        from raytf.checkpoint import durable, manifest, variables

        found = durable.load(self.storage, manifest.list_complete(self.storage)[0])
        variables.restore(self.named, found.tensors)
        self.state.step = found.step
        self.state.durable_step = found.step
        self.replicas._pending = self.replicas._sent = None
        self.saving = self._saving()


def play(orders: Orders, group: Any, number: int, flips: bool, exact: bool) -> dict[str, Any]:
    """Train a run to its end, and tell of it."""
    from raytf.checkpoint import durable, manifest
    from raytf.errors import ReplicaError

    rank = Rank(orders.rank, group, f"{orders.folder}/{number}", exact)
    error: dict[str, Any] = {}
    try:
        rank.train(flips)
    except ReplicaError as raised:
        error = {"text": str(raised), "ranks": raised.ranks, "at": rank.state.step}
        error["complete"] = sorted(int(n.split("-")[0]) for n in manifest.list_complete(rank.storage))
        rank.go_back()
        error["from"] = rank.state.step
        rank.train(False)
    rank.saving.save_now((0.0, 0.1, 3.0, 6.0))
    saved = durable.load(rank.storage, manifest.list_complete(rank.storage)[0])
    equal = [np.array_equal(np.asarray(v.value), saved.tensors[name]) for name, v in rank.named.items()]
    return {
        "hash": rank.digest.value(),
        "everything": [float(np.asarray(v.value, np.float64).sum()) for v in rank.named.values()],
        "said": [line for line in rank.said if "weights" in line],
        "events": rank.events,
        "copied": rank.memory.copied,
        "error": error,
        "saved": [saved.step, all(equal)],
        "complete": sorted(int(n.split("-")[0]) for n in manifest.list_complete(rank.storage)),
    }


def main() -> None:
    orders = Orders(**json.loads(sys.argv[1]))
    from raytf.distributed.membership.rendezvous import Meeting
    from raytf.distributed.multi_worker import MultiWorkerGroup

    group = MultiWorkerGroup(Meeting(orders.rank, tuple(orders.addresses), bytes(32)))
    found = [play(orders, group, i, flip == orders.rank, exact) for i, (flip, exact) in enumerate(orders.runs)]
    print(json.dumps(found), flush=True)
    sys.stdin.readline()
    os._exit(0)


if __name__ == "__main__":
    main()
