"""A process that copies a state into memory and saves it, as a worker does, and tells what memory that took.

    python -m tests.tf.state_copy FOLDER MEGABYTES TENSORS one-by-one|all-at-once

The state is on no device: its tensors are made when they are fetched, each as an array of its own, which is what
fetching from a GPU gives. So what is counted is what raytf holds. Ray is not started: the two slots are this process's
own memory files, which counts them as a keeper's are counted in a worker that has mapped them.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from raytf.checkpoint import snapshot_slot, variables
from raytf.checkpoint.codec import DeviceTensor
from raytf.checkpoint.durable import DurableTier, Keep
from raytf.checkpoint.memory import MemoryTier
from raytf.checkpoint.naming import GroupAttempt
from raytf.checkpoint.training_state import TrainingState
from raytf.distributed.group import SingleWorkerGroup
from raytf.distributed.step_agreement import StepFlag, vector
from raytf.runs.run_log import StepLog
from raytf.storage.storage import Storage
from raytf.training.saving.checkpoint_policy import Cadence, CheckpointPolicy
from raytf.training.saving.checkpointer import Checkpointer, Listener
from raytf.training.saving.live_state import LiveState
from raytf.training.user.callbacks import Callbacks

ATTEMPT = "20260101T000000.000-aaaaaa"
KINDS = ("RssAnon", "RssShmem")


@dataclass(frozen=True)
class Spec:
    """In the place of a variable: what of it is asked without its values."""

    shape: tuple[int, ...]


class OnADevice:
    """Tensors of `values` float32 each, of which fetching makes a copy.

    Args:
        all_at_once: have all in the host's memory before the first is copied, as raytf did before it streamed.
    """

    def __init__(self, names: Sequence[str], values: int, all_at_once: bool):
        self._names, self._values, self._all_at_once = list(names), values, all_at_once
        self.nbytes = 4 * values * len(self._names)

    def now(self) -> variables.TensorValues:
        tensors: dict[str, Any] = {
            n: DeviceTensor(np.dtype("f4"), (self._values,), self._fetch(n)) for n in self._names
        }
        if self._all_at_once:
            tensors = {name: remote.fetch() for name, remote in tensors.items()}
        return variables.TensorValues(tensors, is_held=True, is_here=self._all_at_once)

    def _fetch(self, name: str) -> Any:
        return lambda: np.full(self._values, value_of(name), np.float32)


def value_of(name: str) -> float:
    """Of each element of a tensor."""
    return float(name.rpartition("/")[2])


class Peak:
    """The most of each kind of memory that this process held, in bytes; looked at every few milliseconds."""

    def __init__(self) -> None:
        self.bytes = dict.fromkeys((*KINDS, "both"), 0)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def stop(self) -> dict[str, int]:
        self._stop.set()
        self._thread.join()
        return self.bytes

    def _watch(self) -> None:
        while not self._stop.wait(0.004):
            found = status()
            found["both"] = sum(found[kind] for kind in KINDS)
            self.bytes = {kind: max(self.bytes[kind], found[kind]) for kind in self.bytes}


def status() -> dict[str, int]:
    """This process's memory, bytes by kind."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = dict(line.split(":", 1) for line in lines)
    return {kind: 1024 * int(found[kind].split()[0]) for kind in (*KINDS, "VmHWM")}


class Run:
    """A worker's copies and saves, without its training and without Ray."""

    def __init__(self, folder: str, tensors: int, values: int, all_at_once: bool):
        storage, self.state = Storage(folder), TrainingState()
        named: Any = {f"model/{i}": Spec((values,)) for i in range(tensors)}

        def make(names: Sequence[str]) -> OnADevice:
            return OnADevice(names, values, all_at_once)

        group: Any = SingleWorkerGroup(None)  # type: ignore[arg-type]
        self.snapshots = MemoryTier(folder, group, GroupAttempt(ATTEMPT), 10, None, print, (0, 1))
        self.snapshots._source = make(list(named))
        self.snapshots._keeping = SimpleNamespace(is_lost=False, poll=lambda: None, tidy=lambda: None)  # type: ignore[assignment]
        self.snapshots._is_tidy = True
        self.files = [os.memfd_create("state") for _ in range(2)]
        self.snapshots._slots = [snapshot_slot.Slot(f"/proc/{os.getpid()}/fd/{fd}") for fd in self.files]
        self.durable = DurableTier(storage, GroupAttempt(ATTEMPT), Keep(1), print)
        nothing = lambda *_, **__: None  # noqa: E731
        pulse: Any = SimpleNamespace(doing=lambda activity: nullcontext())
        reporter: Any = SimpleNamespace(say=print, event=nothing, report=nothing, upload=nothing, pack_files=nothing)
        model: Any = SimpleNamespace(trainable_variables=[])
        callbacks, log = Callbacks(None, model, group, print, "", {}, None), StepLog(storage, ATTEMPT)
        source = LiveState(0, self.state, {}, model, named, make, callbacks, log, reporter, nothing)
        policy, listener = CheckpointPolicy(Cadence(1_000_000, None)), Listener(reporter, pulse, dict)
        self.saving = Checkpointer(source, self.snapshots, self.durable, group, policy, listener)
        self.saving.start()

    def copy(self) -> None:
        self.state.step += 1
        self.saving.act(vector({StepFlag.COPY: 1.0}))

    def save(self) -> None:
        """A save, which copies the state into memory first; beside it the state is copied into the other slot."""
        self.state.step += 1
        self.saving.act(vector({StepFlag.WANT_SAVE: 1.0}))
        self.copy()
        while self.saving.is_saving:
            self.saving.act(vector(self.saving.save_votes()))
            time.sleep(0.01)
        assert self.state.durable_step == self.state.step - 1, self.durable.failure
        self.snapshots.settle()


def main() -> None:
    folder, megabytes, tensors, how = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    values = megabytes * 2**20 // 4 // tensors
    run = Run(folder, tensors, values, how == "all-at-once")
    before = status()
    peak = Peak()
    run.save()
    most = peak.stop()
    own = {kind: most[kind] - before[kind] for kind in KINDS}
    own["both"] = most["both"] - sum(before[kind] for kind in KINDS)
    own["VmHWM"] = status()["VmHWM"] - before["VmHWM"]
    print(json.dumps(own), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
