"""The monitor's process, which passes each call to the responsible object and stores the state of all objects.

The process may be killed. Ray then starts another process under the same handle and repeats unanswered calls, in any
order. The actor's state is in memory that the driver holds, so nothing is lost and callers do not notice. Calls here
must therefore tolerate arriving twice or out of order.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import pickle
import struct
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from raytf.driver.monitor.progress import Progress
from raytf.driver.supervision.hang_detector import Heartbeats
from raytf.runs.program_output import ProgramOutput
from raytf.runs.status import PARKED, Status
from raytf.training.process.heartbeat_types import HangFinding, HeartbeatState, LastHeartbeat

#: Seconds between two writes of the state if only heartbeats arrive, which are repeated anyway.
_BEATS_SECONDS = 1.0
#: Number of calls whose results are kept in case Ray repeats them. After a kill, Ray first sends the calls made while
#: there was no process, possibly hundreds, and then repeats the unanswered calls.
_CALLS = 1024
#: Number of the write, number of bytes, and a checksum of these numbers and of the bytes that follow.
_HEAD = struct.Struct("<QQI")
#: Stands for all processes of an earlier group.
_GONE = 0
Answer = TypeVar("Answer")


class Outbox:
    """Messages and events that the driver has not confirmed yet, and how many it has confirmed.

    Attributes:
        received: total number of messages that the driver has confirmed.
        noted: total number of events that the driver has confirmed.
    """

    def __init__(self) -> None:
        self._messages: list[str | ProgramOutput] = []
        self._events: list[dict[str, Any]] = []
        self.received = 0
        self.noted = 0

    def say(self, message: str | ProgramOutput) -> None:
        """Add a line for the user, or output of the program's code."""
        self._messages.append(message)

    def book(self, row: dict[str, Any]) -> None:
        self._events.append(row)

    def read(self, received: int, noted: int) -> tuple[list[str | ProgramOutput], list[dict[str, Any]]]:
        """Return messages and events that the reader does not have yet.

        Args:
            received: total number of messages that the reader has; they are dropped here.
            noted: total number of events that the reader has; they are dropped here.
        """
        del self._messages[: max(0, received - self.received)]
        del self._events[: max(0, noted - self.noted)]
        self.received, self.noted = max(received, self.received), max(noted, self.noted)
        return list(self._messages), list(self._events)


class Roster(Heartbeats):
    """The ranks of the current group that have sent heartbeats.

    Attributes:
        blamed: the hang that was found; None while no rank is blamed.
        noticed: ranks on nodes with notice -> Ray's ids of these nodes.
        ends: Ray's ids of nodes whose workers reported a notice -> time of their end, by the clock of `sightings`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blamed: HangFinding | None = None
        self.noticed: dict[int, str] = {}
        self.ends: dict[str, float] = {}

    def begin_group(self) -> int:
        """Start a new group, and return its number."""
        self.blamed, self.noticed = None, {}
        return self.begin()

    def forget(self, ranks: Collection[int]) -> None:
        """Forget ranks that were reassigned to other workers, and clear all blame and notices."""
        super().forget(ranks)
        self.blamed, self.noticed = None, {}


class GroupHistory:
    """Void states and the standing of each node, kept as long as the driver runs.

    Args:
        void: void states of the run, in the form of `raytf.checkpoint.invalidated_states.VoidStates.entries`.
    """

    def __init__(self, void: Sequence[tuple[int, Sequence[str]]] = ()):
        self._void = [(after, list(attempts)) for after, attempts in void]
        #: Node -> process -> step at which the process began to train, and step of the latest audit that it passed.
        self._standings: dict[str, dict[int, tuple[int, int]]] = {}

    def go_back(self, after: int, attempts: Sequence[str]) -> None:
        """Mark states of these attempts after a step as void."""
        entry = after, list(attempts)
        if entry not in self._void:
            self._void.append(entry)

    def stand(self, node: str, process: int, joined: int, vouched: int) -> None:
        """Record the steps at which a process on a node began to train and last passed an audit."""
        standings = self._standings.setdefault(node, {})
        standings.pop(_GONE, None)  # the process started from that standing
        standings[process] = (joined, vouched)

    def begin_group(self) -> None:
        """Forget all processes, but keep the worst standing of each node for the processes of the new group."""
        self._standings = {node: {_GONE: standing} for node, standing in self._worst().items()}

    def for_new_ranks(self) -> tuple[list[tuple[int, list[str]]], dict[str, tuple[int, int]]]:
        """Return the void states, and the standing of each node (that of its worst process)."""
        return list(self._void), self._worst()

    def _worst(self) -> dict[str, tuple[int, int]]:
        return {
            node: (min(joined for joined, _ in standings.values()), min(vouched for _, vouched in standings.values()))
            for node, standings in self._standings.items()
        }


class Parking:
    """The latest request to all ranks to save and wait, and their answer. Each request has a number, its ticket.

    Attributes:
        phase: the phase of the run during this request, for people.
    """

    def __init__(self) -> None:
        self.phase = "resizing"
        self._ticket = self._tickets = self._released = 0
        self._parked: bool | None = None

    def begin_group(self) -> None:
        """Start a group without a request."""
        # Do not release the request, or waiting ranks of the last group would train until they are ended.
        self._ticket = 0

    def park(self, is_stop: bool = False) -> int:
        """Ask all ranks to save and wait, even if they already wait, and return the ticket of this request.

        Args:
            is_stop: whether the run stops afterwards, instead of changing its number of workers.
        """
        self.phase = "saving" if is_stop else "resizing"
        self._released = self._tickets
        self._tickets += 1
        self._ticket, self._parked = self._tickets, None
        return self._ticket

    def release(self, ticket: int) -> None:
        """End the wait, unless there is a newer request than this ticket."""
        if ticket == self._tickets:
            self._released, self._ticket = self._tickets, 0

    def is_released(self, ticket: int) -> bool:
        """Return whether ranks that wait because of this request may continue to train."""
        return ticket <= self._released

    def wanted(self) -> int:
        """Return the ticket of the request to save and wait; 0 if there is none."""
        return self._ticket

    def answer(self, ticket: int, saved: bool) -> None:
        """Record whether the ranks, which now wait, could save. Answers to old requests, perhaps from dead ranks, are
        ignored."""
        if ticket == self._ticket:
            self._parked = saved

    def parked(self, ticket: int) -> bool | None:
        """Return the answer to a request.

        Returns:
            None until there is one.
        """
        return self._parked if ticket and ticket == self._ticket else None


# -- the actor ---------------------------------------------------------------------------------------------------------


def _answered_by(role: str, method: Callable[..., Answer]) -> Callable[..., Answer]:
    """Return a method of the Monitor that forwards each call to `method` of its attribute `role`."""

    @functools.wraps(method)
    def call(self: Monitor, *args: Any) -> Answer:
        return method(getattr(self, role), *args)

    return call


def _changes(method: Callable[..., Answer]) -> Callable[..., Answer]:
    """Return a method that stores its changes before it returns, and only repeats its result if a call is repeated."""

    @functools.wraps(method)
    def call(self: Monitor, *args: Any) -> Answer:
        if self._memo is None:
            return method(self, *args)
        name = self._call()
        if name not in self._results:
            result = method(self, *args)
            self._results[name] = result
            while len(self._results) > _CALLS:
                del self._results[next(iter(self._results))]
            self._keep()
        return self._results[name]

    return call


class Monitor:
    """An actor that workers and controller report to and that the driver reads; it exits with the driver.

    Args:
        attempts: names of the run's worker groups so far.
        clock: returns monotonic time in seconds, the same for all processes on the machine.
        epoch: returns seconds since the epoch, for events.
        memo: holds the state of this Monitor, starting with that of an earlier one. By default no state is kept.
        call: returns an id of the current call, which stays the same if the call is repeated.
        is_another: returns whether this Monitor replaces one that was killed.
        void: as for `GroupHistory`.

    Raises:
        OSError: this Monitor replaces another one, but cannot read its state.
    """

    def __init__(
        self,
        attempts: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        epoch: Callable[[], float] = time.time,
        memo: CrashSafeMemory | None = None,
        call: Callable[[], str] = lambda: "",
        is_another: Callable[[], bool] = lambda: False,
        void: Sequence[tuple[int, Sequence[str]]] = (),
    ) -> None:
        self._clock, self._epoch, self._memo, self._call = clock, epoch, memo, call
        self._kept_at = clock()
        #: Results of calls that may be sent again, by the call's id.
        self._results: dict[str, Any] = {}
        self._outbox = Outbox()
        self._progress = Progress(attempts, clock())
        self._roster = Roster()
        self._parking = Parking()
        self._history = GroupHistory(void)
        self._measured: dict[str, float] = {}
        known = None
        try:
            known = None if memo is None else memo.read()
        except OSError:  # the driver is in another container
            if is_another():
                raise
            self._memo = None
        if known is not None:
            self.__dict__ |= pickle.loads(known)
            self._roster.forgive(clock())  # no heartbeats could arrive in the meantime

    def _keep(self) -> None:
        if self._memo is not None:
            own = {name: value for name, value in self.__dict__.items() if name not in _NOT_KEPT}
            self._memo.write(pickle.dumps(own))
            self._kept_at = self._clock()

    # -- the progress of the run ---------------------------------------------------------------------------------------

    @_changes
    def update(self, status: Status) -> None:
        """Record the status of the run, from rank 0; only this Monitor knows why parked ranks wait."""
        if status.phase == PARKED:
            status = dataclasses.replace(status, phase=self._parking.phase)
        note = self._progress.update(status, self._clock())
        if note is not None:
            self.event(*note)

    @_changes
    def begin(self, attempt: str) -> tuple[list[str], int | None]:
        """Record that a worker group starts; see `Progress.begin`."""
        return self._progress.begin(attempt, self._clock())

    commits = _changes(_answered_by("_progress", Progress.commits))
    is_saving = _answered_by("_progress", Progress.is_saving)
    is_over = _answered_by("_progress", Progress.is_over)
    past = _changes(_answered_by("_history", GroupHistory.for_new_ranks))
    stand = _changes(_answered_by("_history", GroupHistory.stand))

    @_changes
    def go_back(self, after: int, attempts: list[str]) -> None:
        """Mark states of these attempts after a step as void, because the run rolls back."""
        self._history.go_back(after, attempts)
        self._progress.go_back(after)

    def reached(self) -> int:
        return self._progress.reached

    def durable(self) -> int | None:
        return self._progress.durable

    def is_there(self) -> bool:
        """Return True; only a living Monitor answers."""
        return True

    @_changes
    def stage(self, text: str) -> None:
        """Record the stage, which is shown until the next status."""
        self._progress.stage = text

    # -- reports for the driver ----------------------------------------------------------------------------------------

    say = _changes(_answered_by("_outbox", Outbox.say))

    @_changes
    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Record an event for the ledger, with the time of its arrival by the driver's clock."""
        now = self._clock()
        fields, message = self._progress.happened(kind, fields, self._roster.sightings(now), now)
        if message:
            self._outbox.say(message)
        if kind == "notice" and fields.get("deadline_seconds") is not None:
            self._roster.ends[fields["node"]] = now + fields["deadline_seconds"]
        self._outbox.book({"time": self._epoch(), "kind": kind, **fields})

    @_changes
    def measure(self, values: dict[str, float]) -> None:
        """Record figures that only the driver knows, for TensorBoard."""
        self._measured = values

    def measured(self) -> dict[str, float]:
        return self._measured

    def read(
        self, received: int = 0, noted: int = 0
    ) -> tuple[Status | str, list[str | ProgramOutput], list[dict[str, Any]]]:
        """Return the latest status (or the stage until there is a status), and the result of `Outbox.read`."""
        return self._progress.status or self._progress.stage, *self._outbox.read(received, noted)

    # -- heartbeats ----------------------------------------------------------------------------------------------------

    @_changes
    def begin_group(self) -> int:
        """Start a group of workers without a request to save, and return the number that its heartbeats carry."""
        self._parking.begin_group()
        self._history.begin_group()
        return self._roster.begin_group()

    def group(self) -> int:
        return self._roster.group

    def beat(self, beat: HeartbeatState) -> None:
        """Record a rank's heartbeat."""
        now = self._clock()
        self._roster.hear(beat, now)
        if now - self._kept_at >= _BEATS_SECONDS:
            self._keep()

    forget = _changes(_answered_by("_roster", Roster.forget))

    def sightings(self) -> list[LastHeartbeat]:
        """Return the latest heartbeat of each rank of the current group."""
        return self._roster.sightings(self._clock())

    @_changes
    def blame(self, finding: HangFinding) -> None:
        """Record which ranks of the current group hang. Their peers may also report this before the group has ended."""
        self._roster.blamed = finding

    def blamed(self) -> HangFinding | None:
        return self._roster.blamed

    @_changes
    def set_noticed(self, ranks: dict[int, str]) -> None:
        """Record which ranks of the current group are on nodes with notice, with Ray's ids of these nodes."""
        self._roster.noticed = ranks

    def noticed(self) -> dict[int, str]:
        return self._roster.noticed

    def seconds_left(self, node: str) -> float | None:
        """Return the seconds until a node disappears, or None if its workers reported no deadline."""
        end = self._roster.ends.get(node)
        return None if end is None else max(0.0, end - self._clock())

    # -- saving together -----------------------------------------------------------------------------------------------

    park = _changes(_answered_by("_parking", Parking.park))
    release = _changes(_answered_by("_parking", Parking.release))
    is_released = _answered_by("_parking", Parking.is_released)
    wanted = _answered_by("_parking", Parking.wanted)
    answer = _changes(_answered_by("_parking", Parking.answer))
    parked = _answered_by("_parking", Parking.parked)


#: Attributes that belong to one process, not to the stored state.
_NOT_KEPT = ("_clock", "_epoch", "_memo", "_call", "_kept_at")


# -- crash safe memory -------------------------------------------------------------------------------------------------
#
# There are two files, written in turn, and only a complete write counts. A process that is killed while it writes
# therefore leaves its previous write intact.


class CrashSafeMemory:
    """Holds data that a process writes for other processes or its own successor. Can be sent to other processes.

    Args:
        paths: paths of two existing files; see `held`.
    """

    def __init__(self, paths: Sequence[str]):
        self._paths, self._number = tuple(paths), 0

    def read(self) -> bytes | None:
        """Return the bytes of the latest write.

        Returns:
            None if nothing was written.

        Raises:
            OSError: the process that held the files is gone, or the files belong to another user.
        """
        writes = [_parse(_whole(path)) for path in self._paths]
        self._number, data = max((one for one in writes if one is not None), default=(0, None))
        return data

    def write(self, data: bytes) -> None:
        """Replace the older of the last two writes.

        Raises:
            OSError: see `read`.
        """
        self._number += 1
        file = os.open(self._paths[self._number % len(self._paths)], os.O_WRONLY)
        try:
            piece = memoryview(_head(self._number, data) + data)
            while piece:
                piece = piece[os.write(file, piece) :]
        finally:
            os.close(file)


@contextmanager
def held() -> Iterator[CrashSafeMemory]:
    """Yield a memory that other processes on this machine, of the same user, can use during the `with` statement."""
    files = [os.memfd_create("raytf-memo") for _ in range(2)]
    try:
        yield CrashSafeMemory([f"/proc/{os.getpid()}/fd/{file}" for file in files])
    finally:
        for file in files:
            os.close(file)


def _head(number: int, data: bytes) -> bytes:
    check = zlib.crc32(data, zlib.crc32(_HEAD.pack(number, len(data), 0)))
    return _HEAD.pack(number, len(data), check)


def _parse(content: bytes) -> tuple[int, bytes] | None:
    if len(content) < _HEAD.size:
        return None
    number, size, _ = _HEAD.unpack_from(content)
    data = content[_HEAD.size : _HEAD.size + size]
    return (number, data) if len(data) == size and content.startswith(_head(number, data)) else None


def _whole(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
