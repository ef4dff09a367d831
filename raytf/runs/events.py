"""Events of a run, as dataclasses: each of them is a row of the ledger, and has a text for people.

A row may come from any version of raytf: fields that it lacks have defaults, and a row that lacks too much, or is of an
unknown kind, is described by its fields.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from raytf.runs.status import workers_text

#: Characters of Ray's id of a node that people read; it has 56.
_SHORT = 8
_NODE_ID = re.compile(r"\b[0-9a-f]{56}\b")
#: Tier of a state that workers had in their own memory, and continued with.
HELD = "held"
_TIERS = {
    "new": "from the beginning",
    "memory": "from memory of the nodes",
    "durable": "from storage",
    HELD: "where they were",
}
#: Why a driver ended that Ctrl-C stopped.
INTERRUPTED = "interrupted"
#: Fields that the text of an unknown row leaves out: they are shown elsewhere, or fill pages.
_NOT_SAID = ("time", "kind", "step", "stall", "trace", "silent", "stacks", "rank", "attempt", "retry")


@dataclass(frozen=True)
class RunEvent:
    """An event of a run. If a field's name in the ledger is a keyword of Python, the field has it as metadata."""

    kind: ClassVar[str]

    def fields(self) -> dict[str, Any]:
        """Return the row for the ledger, without kind and time."""
        return {_name(f): getattr(self, f.name) for f in dataclasses.fields(self)}

    @property
    def text(self) -> str:
        raise NotImplementedError


@dataclass(frozen=True)
class FaultEvent(RunEvent):
    """An attempt ended.

    Attributes:
        cause: as of `raytf.driver.supervision.failures.Cause`.
        ranks, nodes: those to blame; nodes by Ray's ids.
        failure: what happened, without a full stop.
        retry: whether the run continues.
        preemption: whether the loss was announced.
        survived: whether the other workers continue where they are.
    """

    kind: ClassVar[str] = "fault"
    cause: str = ""
    ranks: Sequence[int] = ()
    nodes: Sequence[str] = ()
    failure: str = field(default="", metadata={"row": "text"})
    retry: bool = True
    preemption: bool = False
    survived: bool = False

    def fields(self) -> dict[str, Any]:
        row = super().fields()
        if not self.survived:
            del row["survived"]
        if self.preemption:  # after which every run continues
            del row["retry"]
        return row

    @property
    def text(self) -> str:
        ending = " (preemption)" if self.preemption else "" if self.retry else "; the run ends"
        ending += "; the others continue" if self.survived else ""
        summary = self.failure or self.cause.replace("_", " ") or "the attempt ended"
        return f"{summary}{_listed('rank', self.ranks)}{_listed('node', map(short, self.nodes))}{ending}"


@dataclass(frozen=True)
class Hang(RunEvent):
    """A worker makes no progress, and is stopped.

    Attributes:
        rank: None where its group was starting, and it had none yet.
        node, address, pid: where it is: Ray's id of the node, its IP address, the process.
        where: the activity in which it hangs, or how that was noticed.
        why: in words.
        seconds: without progress.
        file: of the run, with all stacks.
        stacks: Python's, by rank.
    """

    kind: ClassVar[str] = "hang"
    rank: int | None = None
    node: str = ""
    address: str = ""
    pid: int = 0
    step: int | None = None
    where: str = ""
    why: str = field(default="", metadata={"row": "text"})
    seconds: float = 0.0
    file: str = ""
    stacks: Mapping[int, str] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        row = super().fields()
        if self.step is None:  # the status knows it
            del row["step"]
        return row

    @property
    def who(self) -> str:
        """Return the worker, also one without a rank."""
        place = f" on node {self.address or short(self.node)}" if self.address or self.node else ""
        process = f" (pid {self.pid})" if self.pid else ""
        return f"a worker{place}{process}" if self.rank is None else f"rank {self.rank}"

    @property
    def text(self) -> str:
        where = f", where {self.where}" if self.where else ""
        return f"{self.who} hangs: {self.why}{where}"


@dataclass(frozen=True)
class Slow(RunEvent):
    """A rank takes longer than its peers: `ratio` times as long."""

    kind: ClassVar[str] = "straggler"
    rank: int
    node: str = ""
    ratio: float = math.nan

    @property
    def text(self) -> str:
        return f"rank {self.rank} takes {self.ratio:.1f} times as long as its peers"


@dataclass(frozen=True)
class Exclude(RunEvent):
    """A node is excluded from the run."""

    kind: ClassVar[str] = "exclude"
    node: str
    why: str = ""

    @property
    def text(self) -> str:
        return f"node {short(self.node)} is excluded: {self.why}"


@dataclass(frozen=True)
class _Change(RunEvent):
    before: int = field(metadata={"row": "from"})
    after: int = field(default=0, metadata={"row": "to"})
    why: str = ""
    preemption: bool = False

    @property
    def text(self) -> str:
        return f"from {self.before} to {workers_text(self.after)}" + (f": {self.why}" if self.why else "")


@dataclass(frozen=True)
class Park(_Change):
    """The driver asks the ranks to save and wait, before a planned change of the number of workers."""

    kind: ClassVar[str] = "park"

    @property
    def text(self) -> str:
        return f"the workers are asked to save: {self.why}"


@dataclass(frozen=True)
class Resize(_Change):
    """A group of another size replaces the group."""

    kind: ClassVar[str] = "resize"


@dataclass(frozen=True)
class Waiting(RunEvent):
    """The cluster has room for `possible` workers, but at least `wanted` must run."""

    kind: ClassVar[str] = "waiting"
    possible: int
    wanted: int

    @property
    def text(self) -> str:
        return f"waits for nodes: {self.possible} of at least {self.wanted} workers can run"


@dataclass(frozen=True)
class Drain(RunEvent):
    """Ray reported that a node of the group will be preempted, in `deadline_seconds` if that is known."""

    kind: ClassVar[str] = "drain"
    node: str
    deadline_seconds: float | None = None

    @property
    def text(self) -> str:
        return f"node {short(self.node)} is about to go{_deadline(self.deadline_seconds)}"


@dataclass(frozen=True)
class NoticeEvent(RunEvent):
    """A cloud announced that it takes a node away."""

    kind: ClassVar[str] = "notice"
    node: str
    notice: str = "it will go"
    deadline_seconds: float | None = None

    @property
    def text(self) -> str:
        return f"node {short(self.node)} has notice: {self.notice}{_deadline(self.deadline_seconds)}"


@dataclass(frozen=True)
class GroupStart(RunEvent):
    """A group of workers starts."""

    kind: ClassVar[str] = "group"
    workers: int
    nodes: Sequence[str] = ()

    @property
    def text(self) -> str:
        return f"a group of {workers_text(self.workers)} starts{_listed('node', map(short, self.nodes))}"


@dataclass(frozen=True)
class WorkerLost(RunEvent):
    """A worker beside parameter servers died; the others continue."""

    kind: ClassVar[str] = "worker_lost"
    worker: int
    why: str = field(default="", metadata={"row": "text"})

    @property
    def text(self) -> str:
        return f"worker {self.worker} died: {without_ids(self.why)}"


@dataclass(frozen=True)
class AttemptEvent(RunEvent):
    """A group has made its first step: where it began, and on which kind of machine its rank 0 computes."""

    kind: ClassVar[str] = "attempt"
    from_step: int | None = None
    tier: str = ""
    world_size: int = 0
    machine: str = ""

    @property
    def text(self) -> str:
        return f"{workers_text(self.world_size)} started at step {self.from_step} ({_TIERS.get(self.tier, self.tier)})"


@dataclass(frozen=True)
class Save(RunEvent):
    """A checkpoint is on storage."""

    kind: ClassVar[str] = "save"
    of_step: int | None = None
    step: int | None = None
    seconds: float | None = None

    @property
    def text(self) -> str:
        seconds = f" in {self.seconds:.1f} s" if isinstance(self.seconds, float) else ""
        return f"saved step {self.step if self.of_step is None else self.of_step}{seconds}"


@dataclass(frozen=True)
class SaveFailed(RunEvent):
    """A checkpoint could not be saved."""

    kind: ClassVar[str] = "save_failed"
    of_step: int | None = None
    step: int | None = None
    why: str = ""

    @property
    def text(self) -> str:
        return f"step {self.step if self.of_step is None else self.of_step} was not saved: {self.why}"


@dataclass(frozen=True)
class Driver(RunEvent):
    """A driver starts or ends.

    Attributes:
        settings: at the start, flag -> value of the settings that differ from their defaults.
        versions: at the start, of the packages that the run uses.
    """

    kind: ClassVar[str] = "driver"
    state: str = ""
    pid: int = 0
    host: str = ""
    outcome: str = ""
    why: str = field(default="", metadata={"row": "text"})
    settings: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        return {name: value for name, value in super().fields().items() if value}

    @property
    def text(self) -> str:
        if self.state == "started":
            return f"driver started (process {self.pid} on {self.host})"
        return f"driver ended: {self.why or self.outcome}"


KINDS: dict[str, type[RunEvent]] = {
    event.kind: event
    for event in (
        FaultEvent,
        Hang,
        Slow,
        Exclude,
        Park,
        Resize,
        Waiting,
        Drain,
        NoticeEvent,
        GroupStart,
        WorkerLost,
        AttemptEvent,
        Save,
        SaveFailed,
        Driver,
    )
}
#: Kinds that are described by their fields -> when they occur, and their fields beside `step`.
OTHERS = {
    "phase": ("The phase of the run changes.", "`phase`, `total`, `workers`, `loss`, `checkpoint`, `snapshot`"),
    "progress": (
        "Every 5 s while a driver runs.",
        "as of `phase`, and `samples_per_second`, `samples_per_step`, `snapshot_bytes`",
    ),
    "replicas": ("The ranks' weights differ.", "`of_step`, `from_step`, `ranks`, `fixed`, `text`"),
    "audit": ("A shard that was computed twice differs.", "`of_step`, `shard`, `ranks`, `text`"),
}


def describe(row: Mapping[str, Any]) -> str:
    """Return a row of the ledger in words."""
    event_class = KINDS.get(row["kind"])
    if event_class is not None:
        names = {_name(f): f.name for f in dataclasses.fields(event_class)}
        values = {names[name]: value for name, value in row.items() if name in names and value is not None}
        try:
            return event_class(**values).text
        except (TypeError, ValueError, AttributeError):  # something is missing, or not what it should be
            pass
    fields = ", ".join(f"{name} {value}" for name, value in row.items() if name not in _NOT_SAID)
    return without_ids(f"{row['kind']}: {fields}" if fields else row["kind"])


def short(node: object) -> str:
    """Return Ray's id of a node, for people."""
    return str(node)[:_SHORT]


def without_ids(text: str) -> str:
    """Return a text with Ray's ids of nodes shortened."""
    return _NODE_ID.sub(lambda match: short(match.group()), text)


def _name(about: dataclasses.Field[Any]) -> str:
    return about.metadata.get("row", about.name)


def _listed(name: str, values: Any) -> str:
    listed = ", ".join(map(str, values))
    return f", {name} {listed}" if listed else ""


def _deadline(seconds: float | None) -> str:
    return "" if seconds is None else f", {seconds:.0f} s"
