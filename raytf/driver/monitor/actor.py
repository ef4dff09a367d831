"""The monitor's process: it hands each call to the role that it is for, and keeps what they know.

Its process may be killed. Ray starts another one under the same handle and sends again what was not answered, in any
order; what the actor knew is in a memo that the driver holds. So nothing is lost and nobody needs to know, as long as
a call that comes twice, or later than one that was made after it, does no harm here.
"""

from __future__ import annotations

import functools
import pickle
import time
from collections.abc import Callable, Sequence
from typing import Any

from raytf.driver.crash_safe_memory import CrashSafeMemory
from raytf.driver.monitor.outbox import Outbox
from raytf.driver.monitor.parking import Parking
from raytf.driver.monitor.progress import Progress
from raytf.driver.monitor.roster import Roster
from raytf.runs.status import Status
from raytf.training.beat import HangFinding, HeartbeatState, LastHeartbeat

#: Between two notes in the memo of beats alone, which come again by themselves.
_BEATS_SECONDS = 1.0
#: Calls whose results are known in case they come again. Ray sends those that were unanswered when the process was
#: killed after all that were made while there was none, which may be hundreds.
_CALLS = 1024


def _changes(method: Callable[..., Any]) -> Callable[..., Any]:
    """What the method changes is in the memo before it returns; a call that comes again only has the same result."""

    @functools.wraps(method)
    def call(self: Monitor, *args: Any) -> Any:
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
    """An actor that rank 0 talks to and the driver reads; it dies with the driver.

    Args:
        attempts: names of the run's starts of worker groups so far.
        clock, epoch: seconds of a clock that only goes forward, the same for all processes of the machine, and of the
            epoch.
        memo: of what this Monitor knows; one that an earlier one has left is taken over. By default nothing is kept.
        call: names the call that is being answered; the same when it is sent again.
        is_another: whether this one comes in the place of one that was killed.

    Raises:
        OSError: it does, and cannot know what that one knew.
    """

    def __init__(
        self,
        attempts: Sequence[str] = (),
        clock: Callable[[], float] = time.monotonic,
        epoch: Callable[[], float] = time.time,
        memo: CrashSafeMemory | None = None,
        call: Callable[[], str] = lambda: "",
        is_another: Callable[[], bool] = lambda: False,
    ) -> None:
        self._clock, self._epoch, self._memo, self._call = clock, epoch, memo, call
        self._kept_at = clock()
        #: Of calls that may come again.
        self._results: dict[str, Any] = {}
        self._outbox = Outbox()
        self._progress = Progress(attempts, clock())
        self._roster = Roster()
        self._parking = Parking()
        self._measured: dict[str, float] = {}
        known = None
        try:
            known = None if memo is None else memo.read()
        except OSError:  # the driver is in a container of its own
            if is_another():
                raise
            self._memo = None
        if known is not None:
            self.__dict__ |= pickle.loads(known)
            self._roster.forgive(clock())  # nobody could be heard meanwhile

    def _keep(self) -> None:
        if self._memo is not None:
            own = {name: value for name, value in self.__dict__.items() if name not in _NOT_KEPT}
            self._memo.write(pickle.dumps(own))
            self._kept_at = self._clock()

    # -- how far the run is --------------------------------------------------------------------------------------------

    @_changes
    def update(self, status: Status) -> None:
        """The status of the run, by rank 0."""
        note = self._progress.update(status, self._clock())
        if note is not None:
            self.event(*note)

    @_changes
    def begin(self, attempt: str) -> tuple[list[str], int | None]:
        """A worker group starts: all attempts before it, and the step of the newest checkpoint on storage, 0 for none.

        Returns:
            None as long as no group of this driver has looked.
        """
        return self._progress.begin(attempt, self._clock())

    def reached(self) -> int:
        """The latest global step that was ever reported."""
        return self._progress.reached

    def is_there(self) -> bool:
        """True, which only one that lives answers."""
        return True

    # -- what the driver reads -----------------------------------------------------------------------------------------

    @_changes
    def say(self, message: str) -> None:
        """A line for the user."""
        self._outbox.say(message)

    @_changes
    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Something happened that the ledger must know; the time is that of this process's clock, for all."""
        now = self._clock()
        fields, said = self._progress.happened(kind, fields, self._roster.sightings(now), now)
        if said:
            self._outbox.say(said)
        self._outbox.book({"time": self._epoch(), "kind": kind, **fields})

    @_changes
    def measure(self, values: dict[str, float]) -> None:
        """What only the driver knows and TensorBoard shows."""
        self._measured = values

    def measured(self) -> dict[str, float]:
        """What the driver last measured."""
        return self._measured

    def read(self, told: int = 0, noted: int = 0) -> tuple[Status | None, list[str], list[dict[str, Any]]]:
        """The latest status, and messages and events that the reader has not got yet.

        Args:
            told, noted: messages and events that it has, altogether; they are dropped here.
        """
        return self._progress.status, *self._outbox.read(told, noted)

    # -- who is alive --------------------------------------------------------------------------------------------------

    @_changes
    def begin_group(self) -> int:
        """A group of workers starts, of which nothing is asked yet; its number, which its beats carry."""
        self._parking.begin_group()
        return self._roster.begin_group()

    def group(self) -> int:
        """The number of the present group."""
        return self._roster.group

    def beat(self, beat: HeartbeatState) -> None:
        """A rank's sign of life."""
        now = self._clock()
        self._roster.hear(beat, now)
        if now - self._kept_at >= _BEATS_SECONDS:
            self._keep()

    def sightings(self) -> list[LastHeartbeat]:
        """The latest sign of life of each rank of the present group."""
        return self._roster.sightings(self._clock())

    @_changes
    def blame(self, finding: HangFinding) -> None:
        """Who of the present group hangs. Its peers may say so too before it has ended."""
        self._roster.blamed = finding

    def blamed(self) -> HangFinding | None:
        """What `blame` said of the present group."""
        return self._roster.blamed

    @_changes
    def set_noticed(self, ranks: dict[int, str]) -> None:
        """Ranks of the present group whose nodes have notice -> Ray's ids of these nodes."""
        self._roster.noticed = ranks

    def noticed(self) -> dict[int, str]:
        """What `set_noticed` said last."""
        return self._roster.noticed

    # -- saving together: see Parking ----------------------------------------------------------------------------------

    @_changes
    def park(self) -> int:
        return self._parking.park()

    @_changes
    def release(self, ticket: int) -> None:
        self._parking.release(ticket)

    def is_released(self, ticket: int) -> bool:
        return self._parking.is_released(ticket)

    def wanted(self) -> int:
        return self._parking.wanted()

    @_changes
    def answer(self, ticket: int, saved: bool) -> None:
        self._parking.answer(ticket, saved)

    def parked(self, ticket: int) -> bool | None:
        return self._parking.parked(ticket)


#: What a process has of its own.
_NOT_KEPT = ("_clock", "_epoch", "_memo", "_call", "_kept_at")
