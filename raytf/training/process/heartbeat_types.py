"""Data classes for heartbeats, which a rank sends once a second, and for hangs that the driver finds in them."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Activity(enum.StrEnum):
    """The activity of a rank."""

    START = "start"  # reading the newest checkpoint, building the model
    LOOP = "loop"  # between steps
    TRACE = "trace"  # the first call of its kind, which TensorFlow compiles
    INPUT = "input"  # waiting for its records
    STEP = "step"  # in a call into TensorFlow: computing, or waiting for the gradients of other ranks
    COLLECTIVE = "collective"  # waiting for the numbers of other ranks
    TRANSFER = "transfer"  # sending weights to other ranks
    REPORT = "report"  # reporting to Ray Train, which waits for all ranks
    VALIDATION = "validation"
    CALLBACK = "callback"
    SAVE = "save"  # waiting for storage
    PARK = "park"  # saved, and waiting to be replaced or released
    END = "end"  # test and export
    DONE = "done"  # has left the training function


#: The activities that make up a step, so their usual duration is known. Other activities have a longer timeout.
USUAL = frozenset({Activity.INPUT, Activity.STEP, Activity.COLLECTIVE})


@dataclass(frozen=True)
class HeartbeatState:
    """One heartbeat of a rank.

    Attributes:
        group: number of the worker group, counted by the driver.
        rank, world_size: the rank, and the size of its group.
        node, address, pid: Ray's id of the node, the node's IP address, and the process id.
        step: global steps done.
        activity: what the rank is doing.
        seconds: time without progress in that activity.
        step_seconds: usual duration of a step, including its input; 0 while not known.
        call_steps: steps per call.
        stacks: file descriptor to which the process writes its Python stacks on `STACKS_SIGNAL`; -1 for none.
        shards: number of logical shards that the rank computes.
        probes, probe_seconds: how often the rank has computed a single shard alone, and the total duration.
        input_seconds: total time that the rank has waited for its records.
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
    """The latest heartbeat of a rank, and the seconds since it arrived."""

    beat: HeartbeatState
    age: float


@dataclass(frozen=True)
class HangFinding:
    """Ranks that hang.

    Attributes:
        beats: the last heartbeat of each rank to blame, ordered by rank.
        seconds: the longest time without progress among them.
        where: `frozen`, `collective` if all wait for each other, or the `Activity` in which they hang.
        text: description for the user, without names of ranks or nodes.
    """

    beats: tuple[HeartbeatState, ...]
    seconds: float
    where: str
    text: str
