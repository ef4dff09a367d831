"""`--log-device-placement`: on which device TensorFlow has put each operation of the training step.

TensorFlow's own log of it goes to the worker's standard error, on whatever machine that is, and there only where its
messages are not silenced. What is shown here comes from the graphs that it runs, placed and optimized.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from raytf import _tensorflow
from raytf.errors import StorageError
from raytf.storage.storage import Storage

FOLDER = "placement"
#: Kinds of operations that a device is told with.
_SHOWN = 6
#: Operations of TensorFlow's own, which compute nothing.
_PLUMBING = frozenset(
    (
        *("Const", "Identity", "IdentityN", "NoOp", "Placeholder", "ReadVariableOp", "StopGradient"),
        *("Enter", "Exit", "LoopCond", "Merge", "NextIteration", "Switch", "_SwitchN"),
        *("_Arg", "_HostRecv", "_HostSend", "_Recv", "_Retval", "_Send"),
    )
)


class PlacedOp(NamedTuple):
    """An operation on its device."""

    device: str
    kind: str
    name: str


class Placement:
    """Reads it from one call, shows a summary and keeps the whole list in the run's folder.

    Args:
        storage: the run's folder.
        attempt: name of this start of the worker group.
        rank: of this worker.
        say: for the user.
    """

    def __init__(self, storage: Storage, attempt: str, rank: int, say: Callable[[str], None]):
        self._storage, self._attempt, self._rank, self._say = storage, attempt, rank, say

    @contextlib.contextmanager
    def read(self, wanted: bool) -> Iterator[None]:
        """Look at what runs inside of the `with` statement for the first time.

        Args:
            wanted: do nothing without.
        """
        if not wanted:
            yield
            return
        with collected() as ops:
            yield
        path = f"{FOLDER}/{self._attempt}-rank-{self._rank}.txt"
        for line in summary(self._rank, ops):
            self._say(line)
        try:
            self._storage.put(path, "".join(f"{op.device} {op.kind} {op.name}\n" for op in sorted(ops)).encode())
            self._say(f"all of them: {self._storage.locate(path)}")
        except StorageError as error:
            self._say(f"the list of them is not kept: {error}")


@contextlib.contextmanager
def collected() -> Iterator[list[PlacedOp]]:
    """A list that has the operations which TensorFlow ran inside of the `with` statement, once that has ended."""
    ops: list[PlacedOp] = []
    with _tensorflow.ran_graphs() as graphs:
        yield ops
    for graph in graphs:
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        ops.extend(PlacedOp(_short(node.device), node.op, node.name) for node in nodes if node.device)


def summary(rank: int, ops: Iterable[PlacedOp]) -> list[str]:
    """A line for each device."""
    found: dict[str, Counter[str]] = {}
    for op in ops:
        found.setdefault(op.device, Counter()).update([] if op.kind in _PLUMBING else [op.kind])
    lines = []
    for device in sorted(found):
        kinds = found[device]
        most = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common(_SHOWN))
        lines.append(
            f"worker {rank}, {device}: {kinds.total()} operations of the step" + (f" ({most})" if most else "")
        )
    return lines


def _short(device: str) -> str:
    """GPU:0 of /job:worker/replica:0/task:1/device:GPU:0."""
    return device.rpartition("device:")[2]
