"""Finds where the time of a distributed step goes, from TensorFlow's profile: intervals by kind of work."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: Kinds of work, in the order of a step. Ops of a model are known by their scope, what is left of them by their place:
#: before the sum of gradients they pack, after it they unpack.
COMPUTE, PACK, SUM, UNPACK = "forward and backward", "pack", "sum over workers, with waits", "unpack"
LOSS_SUM, UPDATE, GAP = "sum of the loss", "optimizer", "no operation runs"
KINDS = (COMPUTE, PACK, SUM, UNPACK, LOSS_SUM, UPDATE, GAP)

_NAME = re.compile(r"^(?P<node>[\w./<>-]*):(?P<kind>\w+)$")
_SUM = re.compile(r"^(Collective\w*|(Eager)?PyFunc(Stateless)?)$")
_MODEL = re.compile(r"gradient_tape/|sequential|functional|compile_loss|crossentropy")
_OPTIMIZER = re.compile(r"(^|/)adam/")
#: Runs twice or more in each step, and is the first large operation of its network.
_MARK = re.compile(r"(Conv2D|MatMul)$")


@dataclass(frozen=True)
class Op:
    """An operation that ran, in seconds since the profile began."""

    node: str
    kind: str
    begin: float
    end: float


@dataclass(frozen=True)
class Step:
    """A step: its length, and the intervals of each kind of work, in seconds since it began."""

    seconds: float
    intervals: dict[str, list[tuple[float, float]]]

    def total(self, kind: str) -> float:
        return sum(end - begin for begin, end in self.intervals[kind])


def read(folder: Path) -> list[Op]:
    """Return the operations of a profile of one process, ordered by their start.

    Raises:
        ValueError: there is none.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    files = sorted(folder.rglob("*.xplane.pb"))
    if not files:
        raise ValueError(f"no profile in {folder}")
    ops = []
    for plane in xplane_pb2.XSpace.FromString(files[-1].read_bytes()).planes:
        for line in plane.lines:
            for event in line.events:
                found = _NAME.match(plane.event_metadata[event.metadata_id].name)
                if found is not None and "::" not in found.string:
                    begin = line.timestamp_ns / 1e9 + event.offset_ps / 1e12
                    ops.append(Op(found["node"], found["kind"], begin, begin + event.duration_ps / 1e12))
    return sorted(ops, key=lambda op: op.begin)


def split(ops: Sequence[Op], steps: int) -> list[Step]:
    """Return the steps of a profile of so many, without the first and the last.

    Raises:
        ValueError: they cannot be told apart.
    """
    marks = [op for op in ops if _MARK.search(op.kind) and "Backprop" not in op.kind and "gradient" not in op.node]
    first = marks[0].node if marks else ""
    begins = [op.begin for op in marks if op.node == first]
    each, rest = divmod(len(begins), steps)
    if not each or rest:
        raise ValueError(f"{len(begins)} times {first!r} in {steps} steps")
    updates = sorted(op.end for op in ops if _OPTIMIZER.search(op.node))
    # A step begins where the update of the one before ends.
    bounds = [max((end for end in updates if end <= begin), default=begin) for begin in begins[each::each]]
    return [
        _step([op for op in ops if begin <= op.begin < end], begin, end) for begin, end in itertools.pairwise(bounds)
    ]


def _step(ops: Sequence[Op], begin: float, end: float) -> Step:
    sums = [op for op in ops if _SUM.match(op.kind)]
    largest = max(sums, key=lambda op: op.end - op.begin, default=None) if len(sums) < 2 else _gradients(sums)
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    for op in ops:
        found[_kind(op, largest)].append((op.begin - begin, min(op.end, end) - begin))
    busy = union([interval for kind in KINDS for interval in found[kind]])
    merged = {kind: union(intervals) for kind, intervals in found.items()}
    merged[GAP] = _between(busy, end - begin)
    return Step(end - begin, merged)


def _gradients(sums: Sequence[Op]) -> Op:
    """Return the sum of the gradients among several sums: the optimizer's own if there is one, otherwise the
    longest."""
    own = [op for op in sums if _OPTIMIZER.search(op.node)]
    return max(own or sums, key=lambda op: op.end - op.begin)


def _kind(op: Op, gradients: Op | None) -> str:
    if _SUM.match(op.kind):
        return SUM if gradients is None or op.node == gradients.node else LOSS_SUM
    scope = "" if gradients is None else gradients.node.rpartition("/")[0] + "/"
    # raytf's loop over micro-batches is within the one over steps, in which the sum is.
    if _MODEL.search(op.node) or (op.node.startswith(scope) and "while/body" in op.node[len(scope) :]):
        return COMPUTE
    if gradients is not None and _OPTIMIZER.search(op.node) and op.kind not in ("ConcatV2", "Split", "SplitV"):
        return UPDATE
    return PACK if gradients is not None and op.begin < gradients.end else UNPACK


def union(intervals: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return intervals without overlaps; intervals that touch are merged."""
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _between(busy: Sequence[tuple[float, float]], seconds: float) -> list[tuple[float, float]]:
    edges = [0.0, *(edge for interval in busy for edge in interval), seconds]
    return [(begin, end) for begin, end in zip(edges[::2], edges[1::2], strict=True) if end > begin]


def typical(steps: Sequence[Step]) -> Step:
    """Return the step of median length."""
    return sorted(steps, key=lambda step: step.seconds)[len(steps) // 2]


def median(steps: Sequence[Step], kind: str) -> float:
    """Return the median seconds of a kind of work in a step."""
    return statistics.median(step.total(kind) for step in steps)
