"""`--log-device-placement`: reports the device of each operation of the training step.

TensorFlow's own placement log is written to the standard error of each worker on its machine, and only if TensorFlow's
messages are not silenced. So raytf reads the placement from the graphs that TensorFlow runs, which are placed and
optimized.
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
#: The number of kinds of operations that the summary names for each device.
_SHOWN = 6
#: TensorFlow's auxiliary operations, which compute nothing.
_PLUMBING = frozenset(
    (
        *("Const", "Identity", "IdentityN", "NoOp", "Placeholder", "ReadVariableOp", "StopGradient"),
        *("Enter", "Exit", "LoopCond", "Merge", "NextIteration", "Switch", "_SwitchN"),
        *("_Arg", "_HostRecv", "_HostSend", "_Recv", "_Retval", "_Send"),
    )
)


class PlacedOp(NamedTuple):
    """An operation and the device that it runs on."""

    device: str
    kind: str
    name: str


@contextlib.contextmanager
def reported(storage: Storage, attempt: str, rank: int, say: Callable[[str], None]) -> Iterator[None]:
    """Report the placement of the graphs that run for the first time inside the `with` statement.

    Args:
        storage: the run's folder, which gets the full list.
        attempt: name of the attempt.
        rank: rank of this worker.
        say: prints a line of the summary for the user.
    """
    with collected() as ops:
        yield
    path = f"{FOLDER}/{attempt}-rank-{rank}.txt"
    for line in summary(rank, ops):
        say(line)
    try:
        storage.put(path, "".join(f"{op.device} {op.kind} {op.name}\n" for op in sorted(ops)).encode())
        say(f"the full list is in {storage.locate(path)}")
    except StorageError as error:
        say(f"the list of operations could not be stored: {error}")


@contextlib.contextmanager
def collected() -> Iterator[list[PlacedOp]]:
    """Yield a list that contains, after the `with` block, the operations that TensorFlow ran inside it."""
    ops: list[PlacedOp] = []
    with _tensorflow.ran_graphs() as graphs:
        yield ops
    for graph in graphs:
        nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
        # /job:worker/replica:0/task:1/device:GPU:0 -> GPU:0
        ops.extend(PlacedOp(node.device.rpartition("device:")[2], node.op, node.name) for node in nodes if node.device)


def summary(rank: int, ops: Iterable[PlacedOp]) -> list[str]:
    """Return a line for each device with its number of operations and their main kinds."""
    kinds_by_device: dict[str, Counter[str]] = {}
    for op in ops:
        kinds_by_device.setdefault(op.device, Counter()).update([] if op.kind in _PLUMBING else [op.kind])
    lines = []
    for device in sorted(kinds_by_device):
        kinds = kinds_by_device[device]
        most = ", ".join(f"{kind} {count}" for kind, count in kinds.most_common(_SHOWN))
        lines.append(
            f"worker {rank}, {device}: {kinds.total()} operations of the step" + (f" ({most})" if most else "")
        )
    return lines
