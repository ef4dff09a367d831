"""Events of a run, as dataclasses. Each event is a row of the ledger, and has a text for people.

A row may come from any version of raytf. Missing fields have defaults; a row without a required field, or of an unknown
kind, is described by its fields.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from raytf.runs.status import workers_text

#: Number of characters of Ray's node ID to show; the full ID has 56.
_SHORT = 8
_NODE_ID = re.compile(r"\b[0-9a-f]{56}\b")
#: The tier of a state that workers still had in their own memory and continued with.
HELD = "held"
_TIERS = {
    "new": "from the beginning",
    "memory": "from memory of the nodes",
    "durable": "from storage",
    HELD: "from their own memory",
}
#: The reason in the event of a driver that Ctrl-C stopped.
INTERRUPTED = "interrupted"
#: Fields that the text of an unknown row omits, because they are shown elsewhere or are too long.
_NOT_SAID = ("time", "kind", "step", "stall", "trace", "silent", "stacks", "rank", "attempt", "retry")


@dataclass(frozen=True)
class RunEvent:
    """An event of a run. If a field has another name in the ledger, its metadata has that name as `row`."""

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
        cause: a value of `raytf.driver.supervision.failures.Cause`.
        ranks, nodes: the ranks and nodes that caused it; nodes by Ray's IDs.
        failure: a description of the failure, without a period.
        retry: whether the run continues.
        preemption: whether the loss was announced.
        survived: whether the other workers continue without a restart.
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
        if self.preemption:  # every run continues after a preemption
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
        rank: its rank, or None if its group was still starting.
        node, address, pid: Ray's ID and the IP address of its node, and its process.
        where: the activity in which it hangs, or how the hang was detected.
        why: the reason, in words.
        seconds: the time without progress.
        file: the run's file with all stacks.
        stacks: Python stacks by rank.
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
        if self.step is None:  # taken from the status instead
            del row["step"]
        return row

    @property
    def who(self) -> str:
        """A text that names the worker, even without a rank."""
        place = f" on node {self.address or short(self.node)}" if self.address or self.node else ""
        process = f" (pid {self.pid})" if self.pid else ""
        return f"a worker{place}{process}" if self.rank is None else f"rank {self.rank}"

    @property
    def text(self) -> str:
        where = f", where {self.where}" if self.where else ""
        return f"{self.who} hangs: {self.why}{where}"


@dataclass(frozen=True)
class Slow(RunEvent):
    """A rank takes `ratio` times as long as its peers."""

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
    """The cluster can run `possible` workers, but the run needs at least `wanted`."""

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
        return f"node {short(self.node)} is about to leave{_deadline(self.deadline_seconds)}"


@dataclass(frozen=True)
class NoticeEvent(RunEvent):
    """A cloud announced that it will preempt a node."""

    kind: ClassVar[str] = "notice"
    node: str
    notice: str = "it will be preempted"
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
    """A worker of a run with parameter servers died; the others continue."""

    kind: ClassVar[str] = "worker_lost"
    worker: int
    why: str = field(default="", metadata={"row": "text"})

    @property
    def text(self) -> str:
        return f"worker {self.worker} died: {without_ids(self.why)}"


@dataclass(frozen=True)
class AttemptEvent(RunEvent):
    """A group has finished its first step. The event has the step from which it started, and the machine of rank 0."""

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
    """A driver starts or stops.

    Attributes:
        settings: at the start, flag -> value of the settings that differ from their defaults.
        versions: at the start, the versions of the packages that the run uses.
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
        "the fields of `phase`, and `samples_per_second`, `samples_per_step`, `snapshot_bytes`",
    ),
    "replicas": ("The ranks' weights differ.", "`of_step`, `from_step`, `ranks`, `fixed`, `text`"),
    "audit": ("A shard that was computed twice differs.", "`of_step`, `shard`, `ranks`, `text`"),
}


def describe(row: Mapping[str, Any]) -> str:
    """Return the text of a ledger row for people."""
    event_class = KINDS.get(row["kind"])
    if event_class is not None:
        names = {_name(f): f.name for f in dataclasses.fields(event_class)}
        values = {names[name]: value for name, value in row.items() if name in names and value is not None}
        try:
            return event_class(**values).text
        except (TypeError, ValueError, AttributeError):  # a field is missing or has a wrong type
            pass
    fields = ", ".join(f"{name} {value}" for name, value in row.items() if name not in _NOT_SAID)
    return without_ids(f"{row['kind']}: {fields}" if fields else row["kind"])


def short(node: object) -> str:
    """Return Ray's ID of a node, shortened for people."""
    return str(node)[:_SHORT]


def without_ids(text: str) -> str:
    """Return a text with Ray's node IDs shortened."""
    return _NODE_ID.sub(lambda match: short(match.group()), text)


def _name(about: dataclasses.Field[Any]) -> str:
    return about.metadata.get("row", about.name)


def _listed(name: str, values: Any) -> str:
    listed = ", ".join(map(str, values))
    return f", {name} {listed}" if listed else ""


def _deadline(seconds: float | None) -> str:
    return "" if seconds is None else f", in {seconds:.0f} s"
