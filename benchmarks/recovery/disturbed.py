"""Parts that `recovery.py` and `goodput.py` share: three programs that train the same network, and their records."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks import models
from benchmarks.harness import HERE, gpus
from raytf.testing import ElasticCluster, Node

#: Images of the data, as many as MNIST has.
RECORDS, BATCH = 60_000, models.BATCH
_TRIES = 3


@dataclass(frozen=True)
class Program:
    """One that can be disturbed.

    Attributes:
        name: in tables.
        script: below benchmarks/.
        flags: that it gets beside those that all have.
        on_ray: whether its workers are Ray's; else they are its own processes.
    """

    name: str
    script: str
    flags: tuple[str, ...] = ()
    on_ray: bool = True

    @property
    def missing(self) -> str:
        """Why it cannot run here; empty where it can."""
        if not self.on_ray and importlib.util.find_spec("tf_keras") is None:
            return f"{self.name} is left out: tf_keras is not installed"
        return ""

    def command(self, run: str, data: Path, folder: Path, *more: str) -> list[str]:
        command = [sys.executable, str(HERE / self.script), "--notes", str(folder / f"{run}.notes")]
        command += ["--data", str(data), "--storage", str(folder), "--run", run, "--steps", "10000000"]
        command += ["--global-batch-size", str(BATCH), *self.flags, *more]
        return command + (["--use-gpu"] if gpus() else [])


def write_data(folder: Path) -> Path:
    """Write images for all programs, into a file that each of their workers reads."""
    x, y = models.images(RECORDS)
    path = folder / "data.npz"
    np.savez(path, x_train=x, y_train=y.astype(np.int32), x_test=x[:BATCH], y_test=y[:BATCH].astype(np.int32))
    return path


def add_node(cluster: ElasticCluster) -> Node:
    """Add a node with one CPU, and one GPU of its own if the machine has GPUs."""
    if gpus():
        # Each raylet offers what it sees; a GPU that a node which has gone had is free again.
        taken = {getattr(node, "gpu", None) for node in cluster.nodes}
        free = next((number for number in range(gpus()) if number not in taken), 0)
        os.environ["CUDA_VISIBLE_DEVICES"] = str(free)
        node = _started(cluster)
        node.gpu = free  # type: ignore[attr-defined]
        return node
    return _started(cluster)


def _started(cluster: ElasticCluster) -> Node:
    for _ in range(_TRIES - 1):
        # Ray gives a node 30 s to start, too few on a loaded machine.
        with contextlib.suppress(RuntimeError):
            return cluster.add_node()
    return cluster.add_node()


@dataclass
class Group:
    """One start of workers; seconds are of the clock that all processes of a machine share.

    Attributes:
        began: when it was about to train.
        workers: how many.
        calls: the step that each call of steps ended at, and when.
        marks: what was said before it began: (what, when).
    """

    began: float
    workers: int
    calls: list[tuple[int, float]] = field(default_factory=list)
    marks: list[tuple[str, float]] = field(default_factory=list)


class Notes:
    """The file in which a program notes its steps. Each look reads what is new."""

    def __init__(self, path: Path):
        self._path, self._read = path, 0
        self._groups: list[Group] = []
        self._marks: list[tuple[str, float]] = []
        self.reached = 0
        path.touch()

    def groups(self) -> list[Group]:
        """Return the groups that have started so far."""
        with self._path.open() as file:
            file.seek(self._read)
            text = file.read()
        whole = text.rpartition("\n")[0]
        self._read += len(whole) + bool(whole)
        for line in whole.splitlines():
            what, when, *more = line.split()
            if what.startswith("mark:"):
                self._marks.append((what[5:], float(when)))
            elif what == "begin":
                self._groups.append(Group(float(when), int(more[0]), marks=self._marks))
                self._marks = []
            else:
                self._groups[-1].calls.append((int(what), float(when)))
                self.reached = max(self.reached, int(what))
        return self._groups

    @property
    def all_marks(self) -> list[tuple[str, float]]:
        """Return the marks of all groups, and those since the start of the last one."""
        return [mark for group in self.groups() for mark in group.marks] + self._marks
