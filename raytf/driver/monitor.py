"""The driver's ear: an actor that workers and Ray Train's controller talk to and the driver reads.

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

from raytf.driver.crash_safe_memory import Memo
from raytf.driver.supervision.hang_detector import Beats
from raytf.runs.restart_phases import Restart, describe
from raytf.runs.status import Status
from raytf.training.beat import Beat, Finding, Sighting

#: Seconds between two notes of the ledger about a run that trains.
PROGRESS_SECONDS = 5.0
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
        memo: Memo | None = None,
        call: Callable[[], str] = lambda: "",
        is_another: Callable[[], bool] = lambda: False,
    ) -> None:
        self._clock, self._epoch, self._memo, self._call = clock, epoch, memo, call
        self._results: dict[str, Any] = {}
        self._kept_at = clock()
        self._restart, self._starts = Restart(), 0
        self._updated_at = self._noted_at = clock()
        self._attempts = list(attempts)
        self._durable: int | None = None
        self._status: Status | None = None
        #: What the driver has not said that it has; and how many came before.
        self._messages: list[str] = []
        self._events: list[dict[str, Any]] = []
        self._told = self._noted = 0
        self._measured: dict[str, float] = {}
        self._reached = 0
        self._noticed: dict[int, str] = {}
        self._ticket = self._tickets = self._released = 0
        self._parked: bool | None = None
        self._beats = Beats()
        self._blamed: Finding | None = None
        known = None
        try:
            known = None if memo is None else memo.read()
        except OSError:  # the driver is in a container of its own
            if is_another():
                raise
            self._memo = None
        if known is not None:
            self.__dict__ |= pickle.loads(known)
            self._beats.forgive(clock())  # nobody could be heard meanwhile

    def _keep(self) -> None:
        if self._memo is not None:
            own = {name: value for name, value in self.__dict__.items() if name not in _NOT_KEPT}
            self._memo.write(pickle.dumps(own))
            self._kept_at = self._clock()

    @_changes
    def update(self, status: Status) -> None:
        before, now = self._status, self._clock()
        self._status, self._updated_at = status, now
        self._reached = max(self._reached, status.step)
        self._durable = max(self._durable or 0, status.checkpoint or 0)
        is_new = before is None or (before.phase, before.workers) != (status.phase, status.workers)
        if is_new or now - self._noted_at >= PROGRESS_SECONDS:
            self._noted_at = now
            self.event("phase" if is_new else "progress", _summary(status))

    @_changes
    def begin(self, attempt: str) -> tuple[list[str], int | None]:
        """A worker group starts: all attempts before it, and the step of the newest checkpoint on storage, 0 for none;
        None as long as no group of this driver has looked."""
        self._restart.joined(self._clock())
        before = list(self._attempts)
        self._attempts.append(attempt)
        return before, self._durable

    def is_there(self) -> bool:
        """True, which only one that lives answers."""
        return True

    @_changes
    def say(self, message: str) -> None:
        self._messages.append(message)

    @_changes
    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Something happened that the ledger shall know; the time is that of this process's clock, for all."""
        now, status = self._clock(), self._status
        fields = ({} if status is None else {"step": status.step, "stall": status.stall_seconds}) | fields
        if kind in ("fault", "hang"):
            # The last sign of life of a group that trained; another one has none yet, or says so by its phase.
            is_training = status is not None and status.phase == "training"
            fields["silent"] = now - self._updated_at if is_training else 0.0
            if is_training:
                # Ranks that survive say how far they came when they leave, the status only twice a second.
                steps = [sighting.beat.step for sighting in self._beats.sightings(now)]
                fields["step"] = max(fields["step"], *steps, 0)
                self._reached = max(self._reached, fields["step"])
            self._restart.fault(now, fields["silent"])
            self._status = None
        elif kind == "group":
            self._restart.group(now)
            self._status = None
        elif kind == "attempt":
            fields["phases"] = self._restart.trains(now, fields["phases"])
            self._starts += 1
            if self._starts > 1:
                self.say(f"restarted in {describe(fields['phases'])}")
        self._events.append({"time": self._epoch(), "kind": kind, **fields})

    @_changes
    def measure(self, values: dict[str, float]) -> None:
        """What only the driver knows and TensorBoard shows."""
        self._measured = values

    def measured(self) -> dict[str, float]:
        """What the driver last measured."""
        return self._measured

    def reached(self) -> int:
        """The latest global step that was ever reported."""
        return self._reached

    @_changes
    def set_noticed(self, ranks: dict[int, str]) -> None:
        """Ranks of the present group whose nodes have notice -> Ray's ids of these nodes."""
        self._noticed = ranks

    def noticed(self) -> dict[int, str]:
        """What `set_noticed` said last."""
        return self._noticed

    @_changes
    def begin_group(self) -> int:
        """A group of workers starts, of which nothing is asked yet; its number, which its beats carry."""
        self._blamed, self._noticed = None, {}
        # Not released: ranks of the last group that wait would train on until they are ended.
        self._ticket = 0
        return self._beats.begin()

    def group(self) -> int:
        """The number of the present group."""
        return self._beats.group

    def beat(self, beat: Beat) -> None:
        """A rank's sign of life."""
        now = self._clock()
        self._beats.hear(beat, now)
        if now - self._kept_at >= _BEATS_SECONDS:
            self._keep()

    def sightings(self) -> list[Sighting]:
        """The latest sign of life of each rank of the present group."""
        return self._beats.sightings(self._clock())

    @_changes
    def blame(self, finding: Finding) -> None:
        """Who of the present group hangs. Its peers may say so too before it has ended; the first word counts."""
        self._blamed = finding

    def blamed(self) -> Finding | None:
        """What `blame` said of the present group."""
        return self._blamed

    @_changes
    def park(self) -> int:
        """Ask the ranks to save and wait, also those that wait already; a ticket for this request."""
        self._released = self._tickets
        self._tickets += 1
        self._ticket, self._parked = self._tickets, None
        return self._ticket

    @_changes
    def release(self, ticket: int) -> None:
        """There is nothing to wait for (any more), unless somebody has asked anew since the request of this ticket."""
        if ticket == self._tickets:
            self._released, self._ticket = self._tickets, 0

    def is_released(self, ticket: int) -> bool:
        """Whether ranks that wait because of a request shall train on."""
        return ticket <= self._released

    def wanted(self) -> int:
        """The ticket of the request to save and wait; 0 where there is none."""
        return self._ticket

    @_changes
    def answer(self, ticket: int, saved: bool) -> None:
        """The ranks wait, and could or could not save. Answers to old requests, perhaps of dead ranks, are void."""
        if ticket == self._ticket:
            self._parked = saved

    def parked(self, ticket: int) -> bool | None:
        """The answer to a request; None as long as there is none."""
        return self._parked if ticket and ticket == self._ticket else None

    def read(self, told: int = 0, noted: int = 0) -> tuple[Status | None, list[str], list[dict[str, Any]]]:
        """The latest status, and messages and events that the reader has not got yet.

        Args:
            told, noted: messages and events that it has, altogether; they are dropped here.
        """
        del self._messages[: max(0, told - self._told)]
        del self._events[: max(0, noted - self._noted)]
        self._told, self._noted = max(told, self._told), max(noted, self._noted)
        return self._status, list(self._messages), list(self._events)


#: What a process has of its own.
_NOT_KEPT = ("_clock", "_epoch", "_memo", "_call", "_kept_at")


def _summary(status: Status) -> dict[str, Any]:
    return {
        "phase": status.phase,
        "step": status.step,
        "total": status.total,
        "workers": status.workers,
        "loss": status.metrics.get("loss"),
        "samples_per_second": status.samples_per_second,
        "checkpoint": status.checkpoint,
        "snapshot": status.snapshot,
        "snapshot_bytes": status.snapshot_bytes,
        "stall": status.stall_seconds,
    }
