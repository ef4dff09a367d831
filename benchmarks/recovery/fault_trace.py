"""Traces of events of a cluster: drawn from a seed, or read from a public trace of spot instances."""

from __future__ import annotations

import enum
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SPOT_TRACE = Path(__file__).with_name("traces") / "g4dn-xlarge-us-east-1c.csv"
#: Instances of the spot trace for each node here.
SPOT_PER_NODE = 4
#: Notice that AWS gives before it takes a spot instance back.
SPOT_NOTICE_SECONDS = 120.0


class Kind(enum.StrEnum):
    """The kinds of events."""

    #: SIGKILL to a worker.
    WORKER = "worker"
    #: SIGKILL to all processes of a node.
    NODE = "node"
    #: A node is told that it will go, and goes later.
    NOTICE = "notice"
    #: A node joins.
    JOIN = "join"


@dataclass(frozen=True, order=True)
class Event:
    """One thing that happens.

    Attributes:
        at: seconds from the beginning.
        kind: what.
        target: says which worker or node it is, modulo those that there are.
        seconds: from a notice to the node's end.
    """

    at: float
    kind: Kind
    target: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Trace:
    """Events in order, on a cluster that has so many nodes before the first one."""

    nodes: int
    seconds: float
    events: tuple[Event, ...]

    @property
    def faults(self) -> int:
        return sum(event.kind is not Kind.JOIN for event in self.events)


def drawn(
    seed: int,
    seconds: float,
    gap: tuple[float, float] = (60.0, 120.0),
    delay: tuple[float, float] = (5.0, 20.0),
    notice: float = 15.0,
    nodes: int = 2,
) -> Trace:
    """Return faults at random moments. Of each three, one kills a worker, one kills a node, and one is a notice.

    Args:
        seed: of the draw.
        seconds: of the trace.
        gap: least and most seconds between two faults.
        delay: least and most seconds from a node's end to the moment at which another one is started in its place.
        notice: seconds between a notice and the end of the node.
        nodes: before the first fault.
    """
    draw = random.Random(f"faults {seed}")
    events: list[Event] = []
    kinds: list[Kind] = []
    at = draw.uniform(*gap)
    while at < seconds:
        if not kinds:
            kinds = [Kind.WORKER, Kind.NODE, Kind.NOTICE]
            draw.shuffle(kinds)
        kind, target = kinds.pop(), draw.randrange(12)
        events.append(Event(at, kind, target, notice if kind is Kind.NOTICE else 0.0))
        if kind is not Kind.WORKER:
            events.append(Event(at + events[-1].seconds + draw.uniform(*delay), Kind.JOIN))
        at += draw.uniform(*gap)
    return Trace(nodes, seconds, tuple(sorted(event for event in events if event.at < seconds)))


def read(path: Path) -> list[tuple[float, int]]:
    """Return a trace's lines: seconds, and the number of instances from then on."""
    return [(float(at), int(count)) for at, count in (line.split(",") for line in path.read_text().split())]


def replayed(
    counts: Sequence[tuple[float, int]],
    seconds: float,
    seed: int = 0,
    per_node: int = SPOT_PER_NODE,
    notice: float = SPOT_NOTICE_SECONDS,
) -> Trace:
    """Return a trace that follows numbers of instances, in scaled time.

    Args:
        counts: as from `read`; the last one tells where it ends.
        seconds: into which all of it is put.
        seed: of the draw of who goes.
        per_node: instances for each node; parts of a node count as one.
        notice: seconds from a notice to an instance's end, before scaling.
    """
    draw = random.Random(f"replay {seed}")
    begin, end = counts[0][0], counts[-1][0]
    scale = seconds / (end - begin)
    nodes = first = -(-counts[0][1] // per_node)
    events: list[Event] = []
    for at, count in counts[1:-1]:
        wanted, when = -(-count // per_node), (at - begin) * scale
        for _ in range(nodes - wanted):
            told = max(0.0, when - notice * scale)
            events.append(Event(told, Kind.NOTICE, draw.randrange(12), when - told))
        events += [Event(when, Kind.JOIN)] * (wanted - nodes)
        nodes = wanted
    return Trace(first, seconds, tuple(sorted(events)))
