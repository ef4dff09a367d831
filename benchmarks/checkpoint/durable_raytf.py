"""raytf's side of benchmark 4: its checkpointer with two tiers, one rank, and what a copy and a disk do beside it.

python -m benchmarks.checkpoint.durable_raytf ADDRESS
"""

from __future__ import annotations

import functools
import os
import shutil
import sys
import tempfile
import time
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray

from benchmarks.peers.checkpoint_model import Watch, build, folder_bytes
from benchmarks.turns import follow
from raytf.checkpoint import memory_keeper, variables
from raytf.checkpoint.durable import DurableTier, Keep
from raytf.checkpoint.manifest import FOLDER
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

_ATTEMPT = "20260101T000000.000-aaaaaa"


class Monitor:
    """In the place of the driver, as long as this program lives."""

    def is_there(self) -> bool:
        return True


class Run:
    """One rank that saves; the driver, which is not measured, is stood in for.

    Args:
        megabytes: of state.
        folder: for files.
    """

    def __init__(self, megabytes: int, folder: str):
        self.folder, self.uri = folder, tempfile.mkdtemp(prefix="raytf-run-", dir=folder)
        model, self.update = build(megabytes)
        named = variables.variables(model)
        group: Any = SingleWorkerGroup(None)  # type: ignore[arg-type]
        storage, self.state = Storage(self.uri), TrainingState()
        monitor = ray.remote(Monitor).options(num_cpus=0).remote()
        self._monitor = monitor
        self.snapshots = MemoryTier(self.uri, group, GroupAttempt(_ATTEMPT), 10, monitor, print, (0, 1))
        make = functools.partial(variables.Variables, named)
        self.snapshots.reserve(variables.sizes(named), make)
        self.tier = DurableTier(storage, GroupAttempt(_ATTEMPT), Keep(1), print)
        nothing = lambda *_, **__: None  # noqa: E731
        pulse: Any = SimpleNamespace(doing=lambda activity: nullcontext())
        reporter: Any = SimpleNamespace(say=print, event=nothing, report=nothing, upload=nothing, pack_files=nothing)
        callbacks, log = Callbacks(None, model, group, print, "", {}, None), StepLog(storage, _ATTEMPT)
        source = LiveState(0, self.state, {}, model, named, make, callbacks, log, reporter, nothing)
        policy, listener = CheckpointPolicy(Cadence(1_000_000, None)), Listener(reporter, pulse, dict)
        self.saving = Checkpointer(source, self.snapshots, self.tier, group, policy, listener)
        self.saving.start()
        self._variables = list(named.values())
        self._target = [np.zeros_like(v) for v in self._values()]
        for _ in range(4):  # both slots, and the saver's memory, are there from now on
            self.memory()
        self.durable()

    def _values(self) -> list[np.ndarray]:
        """Return views of the variables' own memory. Do not keep them, or the next update makes a copy."""
        return [np.asarray(v.value.read_value()) for v in self._variables]

    def memory(self) -> dict[str, Any]:
        """Copy the state into the node's memory, as every ten steps."""
        while not self.snapshots._ready():
            time.sleep(0.05)
        self.state.step += 1
        watch = Watch(self.update)
        flags = vector({StepFlag.COPY: 1.0})
        self.saving.act(flags)
        watch.goes_on()
        self.snapshots.settle()
        watch.is_durable(self.snapshots.bytes // 2)
        assert self.snapshots.copied == self.state.step
        return watch.answer

    def durable(self) -> dict[str, Any]:
        """Save the state to storage."""
        self.state.step += 1
        watch = Watch(self.update)
        self.saving.act(vector({StepFlag.WANT_SAVE: 1.0}))
        watch.goes_on()
        while self.saving.is_saving:
            self.saving.act(vector(self.saving.save_votes()))
            time.sleep(0.001)
        watch.is_durable(folder_bytes(f"{self.uri}/{FOLDER}/{self.tier.name}"))
        assert self.state.durable_step == self.state.step
        self.tier.settle(60.0)
        return watch.answer

    def copy(self) -> dict[str, Any]:
        """Copy as many bytes in memory, with one thread."""
        values = self._values()
        began = time.perf_counter()
        for target, source in zip(self._target, values, strict=True):
            np.copyto(target, source)
        return {"stall": time.perf_counter() - began}

    def disk(self) -> dict[str, Any]:
        """Write as many bytes into a new file, and wait until they are on disk."""
        path = f"{self.folder}/raw"
        began = time.perf_counter()
        with open(path, "wb") as out:
            for array in self._target:
                out.write(array.reshape(-1).view(np.uint8).data)
            out.flush()
            os.fsync(out.fileno())
        taken = time.perf_counter() - began
        os.unlink(path)
        return {"durable": taken}

    def close(self) -> None:
        memory_keeper.dismiss(self.uri)
        shutil.rmtree(self.uri)


def main() -> None:
    megabytes, run = 0, None
    with tempfile.TemporaryDirectory(prefix="raytf-ray-") as own:
        ray.init(num_cpus=2, include_dashboard=False, _temp_dir=own)
        for _, answer in follow(sys.argv[1], 0):
            if run is None or answer["megabytes"] != megabytes:
                if run is not None:
                    run.close()
                    run = None
                megabytes = answer["megabytes"]
                run = Run(megabytes, answer["folder"])
            answer.update(getattr(run, answer["what"])())
        if run is not None:
            run.close()
        ray.shutdown()


if __name__ == "__main__":
    main()
    os._exit(0)
