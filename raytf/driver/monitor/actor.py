"""The monitor's process: it passes each call to the object that is responsible, and stores the state of all.

Its process may be killed. Ray then starts another one under the same handle and sends unanswered calls again, in any
order; the state of the actor is in a memory that the driver holds. So nothing is lost and callers need not know, as
long as a call that arrives twice, or after a later one, does no harm here.
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

#: Seconds between two stores of the state because of heartbeats alone, which are repeated anyway.
_BEATS_SECONDS = 1.0
#: Calls whose results are kept in case they are sent again. After a kill Ray sends the unanswered calls after all those
#: made while there was no process, which may be hundreds.
_CALLS = 1024
#: Number of the write, number of bytes, and a checksum of both and of the bytes that follow.
_HEAD = struct.Struct("<QQI")
#: In place of a process: those of an earlier group.
_GONE = 0
Answer = TypeVar("Answer")


class Outbox:
    """Messages and events that the driver has not confirmed yet, and how many came before.

    Attributes:
        received: messages that the driver has, in total.
        noted: events that the driver has, in total.
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
            received: messages that it has, in total; they are dropped here.
            noted: events that it has, in total; they are dropped here.
        """
        del self._messages[: max(0, received - self.received)]
        del self._events[: max(0, noted - self.noted)]
        self.received, self.noted = max(received, self.received), max(noted, self.noted)
        return list(self._messages), list(self._events)


class Roster(Heartbeats):
    """The ranks of the present group, as far as they have sent heartbeats.

    Attributes:
        blamed: who hangs; None while no rank is blamed.
        noticed: ranks on nodes with notice -> Ray's ids of these nodes.
        ends: Ray's ids of nodes whose workers reported a notice -> when they go, by the clock of `sightings`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blamed: HangFinding | None = None
        self.noticed: dict[int, str] = {}
        self.ends: dict[str, float] = {}

    def begin_group(self) -> int:
        """Start a group, of which nothing is known yet; returns its number."""
        self.blamed, self.noticed = None, {}
        return self.begin()

    def forget(self, ranks: Collection[int]) -> None:
        """Forget ranks that other workers have now; nobody is blamed any more."""
        super().forget(ranks)
        self.blamed, self.noticed = None, {}


class GroupHistory:
    """Kept as long as the driver lives.

    Args:
        void: of the run's folder, as `raytf.checkpoint.invalidated_states.VoidStates.entries` has them.
    """

    def __init__(self, void: Sequence[tuple[int, Sequence[str]]] = ()):
        self._void = [(after, list(attempts)) for after, attempts in void]
        #: Node -> process -> the step at which it began to train, and that of the latest audit that has agreed with it.
        self._standings: dict[str, dict[int, tuple[int, int]]] = {}

    def go_back(self, after: int, attempts: Sequence[str]) -> None:
        """Mark states after a step, of these attempts, as void."""
        entry = after, list(attempts)
        if entry not in self._void:
            self._void.append(entry)

    def stand(self, node: str, process: int, joined: int, vouched: int) -> None:
        """Record since which step a process of a node trains, and at which step an audit has agreed with it last."""
        standings = self._standings.setdefault(node, {})
        standings.pop(_GONE, None)  # this process has begun with that
        standings[process] = (joined, vouched)

    def begin_group(self) -> None:
        """Forget all processes; those of the new group begin with what is known of their nodes."""
        self._standings = {node: {_GONE: standing} for node, standing in self._worst().items()}

    def for_new_ranks(self) -> tuple[list[tuple[int, list[str]]], dict[str, tuple[int, int]]]:
        """Return void states, and the standing of each node, which is that of its worst process."""
        return list(self._void), self._worst()

    def _worst(self) -> dict[str, tuple[int, int]]:
        return {
            node: (min(joined for joined, _ in standings.values()), min(vouched for _, vouched in standings.values()))
            for node, standings in self._standings.items()
        }


class Parking:
    """The latest request that the ranks save and wait, and their answer. Each request has a number, its ticket.

    Attributes:
        phase: what the ranks do because of it, for people.
    """

    def __init__(self) -> None:
        self.phase = "resizing"
        self._ticket = self._tickets = self._released = 0
        self._parked: bool | None = None

    def begin_group(self) -> None:
        """Start a group, without a request yet."""
        # Not released: ranks of the last group that wait would otherwise train on until they are ended.
        self._ticket = 0

    def park(self, is_stop: bool = False) -> int:
        """Ask the ranks to save and wait, even those that already wait; returns the ticket of this request.

        Args:
            is_stop: whether the run stops then, rather than changes the number of workers.
        """
        self.phase = "saving" if is_stop else "resizing"
        self._released = self._tickets
        self._tickets += 1
        self._ticket, self._parked = self._tickets, None
        return self._ticket

    def release(self, ticket: int) -> None:
        """End the wait, unless there was another request after the one with this ticket."""
        if ticket == self._tickets:
            self._released, self._ticket = self._tickets, 0

    def is_released(self, ticket: int) -> bool:
        """Return whether ranks that wait because of a request may train on."""
        return ticket <= self._released

    def wanted(self) -> int:
        """Return the ticket of the request to save and wait; 0 if there is none."""
        return self._ticket

    def answer(self, ticket: int, saved: bool) -> None:
        """Take the answer of the ranks: they wait, and could or could not save. Answers to old requests, perhaps of
        dead ranks, are ignored."""
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
    """Return a method of the Monitor that passes a call on to its attribute `role`, which has this method."""

    @functools.wraps(method)
    def call(self: Monitor, *args: Any) -> Answer:
        return method(getattr(self, role), *args)

    return call


def _changes(method: Callable[..., Answer]) -> Callable[..., Answer]:
    """Store what the method changes before it returns; if the call is sent again, only return the same result."""

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
    """An actor that rank 0 reports to and the driver reads; it dies with the driver.

    Args:
        attempts: names of the run's worker groups so far.
        clock: seconds of a clock that only goes forward, the same for all processes of the machine.
        epoch: seconds of the epoch, for events.
        memo: holds the state of this Monitor; state left by an earlier one is taken over. By default nothing is kept.
        call: an id of the call that is being answered; the same when the call is sent again.
        is_another: whether this Monitor replaces one that was killed.
        void: as for `GroupHistory`.

    Raises:
        OSError: it replaces one, but cannot read its state.
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
            self._roster.forgive(clock())  # no heartbeats arrived meanwhile

    def _keep(self) -> None:
        if self._memo is not None:
            own = {name: value for name, value in self.__dict__.items() if name not in _NOT_KEPT}
            self._memo.write(pickle.dumps(own))
            self._kept_at = self._clock()

    # -- the progress of the run ---------------------------------------------------------------------------------------

    @_changes
    def update(self, status: Status) -> None:
        """Take the status of the run, from rank 0. Only this Monitor knows why parked ranks wait."""
        if status.phase == PARKED:
            status = dataclasses.replace(status, phase=self._parking.phase)
        note = self._progress.update(status, self._clock())
        if note is not None:
            self.event(*note)

    @_changes
    def begin(self, attempt: str) -> tuple[list[str], int | None]:
        """Take note that a worker group starts: see `Progress.begin`."""
        return self._progress.begin(attempt, self._clock())

    commits = _changes(_answered_by("_progress", Progress.commits))
    is_saving = _answered_by("_progress", Progress.is_saving)
    is_over = _answered_by("_progress", Progress.is_over)
    past = _changes(_answered_by("_history", GroupHistory.for_new_ranks))
    stand = _changes(_answered_by("_history", GroupHistory.stand))

    @_changes
    def go_back(self, after: int, attempts: list[str]) -> None:
        """Mark states after a step, of these attempts, as void: the run goes back."""
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
        """Take the stage until the next status."""
        self._progress.stage = text

    # -- what the driver reads -----------------------------------------------------------------------------------------

    say = _changes(_answered_by("_outbox", Outbox.say))

    @_changes
    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Take an event for the ledger; its time is that at which it arrives here, by the driver's clock."""
        now = self._clock()
        fields, message = self._progress.happened(kind, fields, self._roster.sightings(now), now)
        if message:
            self._outbox.say(message)
        if kind == "notice" and fields.get("deadline_seconds") is not None:
            self._roster.ends[fields["node"]] = now + fields["deadline_seconds"]
        self._outbox.book({"time": self._epoch(), "kind": kind, **fields})

    @_changes
    def measure(self, values: dict[str, float]) -> None:
        """Take figures that only the driver knows and TensorBoard shows."""
        self._measured = values

    def measured(self) -> dict[str, float]:
        return self._measured

    def read(
        self, received: int = 0, noted: int = 0
    ) -> tuple[Status | str, list[str | ProgramOutput], list[dict[str, Any]]]:
        """Return the latest status, or the stage while there is none, and the result of `Outbox.read`."""
        return self._progress.status or self._progress.stage, *self._outbox.read(received, noted)

    # -- who is alive --------------------------------------------------------------------------------------------------

    @_changes
    def begin_group(self) -> int:
        """Start a group of workers, without a request to save yet; returns its number, which its heartbeats carry."""
        self._parking.begin_group()
        self._history.begin_group()
        return self._roster.begin_group()

    def group(self) -> int:
        return self._roster.group

    def beat(self, beat: HeartbeatState) -> None:
        """Take a rank's heartbeat."""
        now = self._clock()
        self._roster.hear(beat, now)
        if now - self._kept_at >= _BEATS_SECONDS:
            self._keep()

    forget = _changes(_answered_by("_roster", Roster.forget))

    def sightings(self) -> list[LastHeartbeat]:
        """Return the latest heartbeat of each rank of the present group."""
        return self._roster.sightings(self._clock())

    @_changes
    def blame(self, finding: HangFinding) -> None:
        """Record who in the present group hangs. Its peers may report it, too, before the group has ended."""
        self._roster.blamed = finding

    def blamed(self) -> HangFinding | None:
        return self._roster.blamed

    @_changes
    def set_noticed(self, ranks: dict[int, str]) -> None:
        """Record which ranks of the present group are on nodes with notice, with Ray's ids of these nodes."""
        self._roster.noticed = ranks

    def noticed(self) -> dict[int, str]:
        return self._roster.noticed

    def seconds_left(self, node: str) -> float | None:
        """Return the seconds until a node goes, as its own workers reported; None if they did not."""
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
# There are two files, written in turn, and only a complete one counts. So a process that is killed while it writes
# leaves what it wrote before.


class CrashSafeMemory:
    """Holds what a process writes, for another process or its own successor to read. Can be sent to other processes.

    Args:
        paths: of two files that exist; see `held`.
    """

    def __init__(self, paths: Sequence[str]):
        self._paths, self._number = tuple(paths), 0

    def read(self) -> bytes | None:
        """Return the bytes that were written last.

        Returns:
            None if nothing was written.

        Raises:
            OSError: the process that held the files is gone, or they are another user's.
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
    """Provide a memory that other processes of this machine and user may use during the `with` statement."""
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
