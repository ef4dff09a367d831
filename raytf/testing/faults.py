"""What may be done to a run from outside, and what became of it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field


class Kind(enum.StrEnum):
    """What a fault does."""

    WORKER = "worker"  # SIGKILL to one worker
    PAUSE = "pause"  # SIGSTOP to one worker, and SIGCONT some seconds later
    NODE = "node"  # SIGKILL to all processes of a node
    RAYLET = "raylet"  # SIGKILL to a node's raylet
    DRAIN = "drain"  # notice for a node, and SIGKILL to all of it some seconds later
    ADD = "add"  # a node joins
    CONTROLLER = "controller"  # SIGKILL to Ray Train's controller
    DRIVER = "driver"  # SIGKILL to the command; it is started again
    STORAGE = "storage"  # writes to the object store fail


@dataclass(frozen=True)
class Fault:
    """One fault.

    Attributes:
        step: global step that the run must have reached.
        kind: what is done.
        target: which of the living workers or nodes, modulo their number, the oldest node first.
        seconds: from SIGSTOP to SIGCONT, or from a node's notice to its end.
        writes: to the object store that fail.
        after_writes: to the object store that succeed before those that fail.
        at_once: do not wait until the run has recovered from the fault before.

    Raises:
        ValueError: a number is negative, or there is nothing to fail.
    """

    step: int
    kind: Kind
    target: int = 0
    seconds: float = 10.0
    writes: int = 1
    at_once: bool = False
    after_writes: int = 0

    def __post_init__(self) -> None:
        if min(self.step, self.target, self.seconds, self.after_writes) < 0 or self.writes < 1:
            raise ValueError(f"expected numbers that are not negative, and at least one write: {self}")
        object.__setattr__(self, "kind", Kind(self.kind))  # its plain name is as good


@dataclass(frozen=True)
class Injection:
    """What became of a fault.

    Attributes:
        done: what was done; or `skipped: ` or `not reached: ` and why nothing was.
        step: that the run had reached, as its status file said; None where it had ended.
        workers: world size before it; None where it had ended.
        seconds: since the plan began.
    """

    fault: Fault
    done: str
    step: int | None
    workers: int | None
    seconds: float

    @property
    def is_done(self) -> bool:
        """Whether anything was done."""
        return not self.done.startswith(("skipped", "not reached"))

    def __str__(self) -> str:
        step = "" if self.step is None else f" at step {self.step} of {self.workers} workers"
        return f"{self.seconds:6.1f} s  {self.fault.kind} wanted at step {self.fault.step}{step}: {self.done}"


@dataclass(frozen=True)
class Report:
    """How a run under a plan ended.

    Attributes:
        code: exit code of the last start of the command.
        output: of all starts.
        starts: how often the command was started.
        injections: one for each fault.
        seconds: from the first start to the end.
    """

    code: int
    output: str
    starts: int
    injections: list[Injection] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        end = f"exit code {self.code} after {self.seconds:.0f} s and {self.starts} starts"
        return "\n".join([end, *map(str, self.injections)])
