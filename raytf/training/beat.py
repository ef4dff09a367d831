"""What a rank says of itself once a second, what is seen of it, and what is found of one that hangs."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Activity(enum.StrEnum):
    """What a rank does."""

    START = "start"  # reading the newest checkpoint, building the model
    LOOP = "loop"  # between steps
    TRACE = "trace"  # the first call of its kind, which TensorFlow compiles
    INPUT = "input"  # waiting for its records
    STEP = "step"  # in a call into TensorFlow: computing, or waiting for the others' gradients
    COLLECTIVE = "collective"  # waiting for the others' numbers
    TRANSFER = "transfer"  # sending weights to the others
    REPORT = "report"  # telling Ray Train, which waits for all ranks
    VALIDATION = "validation"
    CALLBACK = "callback"
    SAVE = "save"  # waiting for storage
    PARK = "park"  # saved, and waiting to be replaced or released
    END = "end"  # test and export
    DONE = "done"  # has left the training function


#: These make up a step, so that they have a usual length; the others may last this many times the limit.
USUAL = frozenset({Activity.INPUT, Activity.STEP, Activity.COLLECTIVE})


@dataclass(frozen=True)
class HeartbeatState:
    """What a rank says of itself.

    Attributes:
        group: number of the worker group, counted by the driver.
        rank, world_size: of it.
        node, address, pid: where it is: Ray's id of the node, its IP address, the process.
        step: global steps done.
        activity: what it does.
        seconds: without progress in it.
        step_seconds: usual length of a step, with its input; 0 while not known.
        call_steps: steps of a call.
        stacks: file descriptor to which it writes its Python stacks on `STACKS_SIGNAL`; -1 for none.
        shards: logical shards that it computes.
        probes, probe_seconds: how often it has computed one of them alone, and in how long altogether.
        input_seconds: that it has waited for its records, altogether.
    """

    group: int
    rank: int
    world_size: int
    node: str
    address: str
    pid: int
    step: int = 0
    activity: Activity = Activity.START
    seconds: float = 0.0
    step_seconds: float = 0.0
    call_steps: int = 1
    stacks: int = -1
    shards: int = 1
    probes: int = 0
    probe_seconds: float = 0.0
    input_seconds: float = 0.0


@dataclass(frozen=True)
class LastHeartbeat:
    """The latest beat of a rank, and the seconds since it came."""

    beat: HeartbeatState
    age: float


@dataclass(frozen=True)
class HangFinding:
    """Ranks that hang.

    Attributes:
        beats: the last of each rank to blame, by rank.
        seconds: without progress, the longest of them.
        where: what they do: `frozen`, `collective` where all wait for each other, or an `Activity`.
        text: says it to people, without names.
    """

    beats: tuple[HeartbeatState, ...]
    seconds: float
    where: str
    text: str
