"""How every process of a run talks to the driver's monitor: its workers, Ray Train's controller, and the driver.

What tells it something never waits; what asks waits for the answer, or returns a `Question` that is looked at later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

import ray
from ray.actor import ActorHandle

from raytf.runs.events import RunEvent
from raytf.runs.status import Status
from raytf.training.beat import HangFinding, HeartbeatState, LastHeartbeat

Answer = TypeVar("Answer")


class Question(Generic[Answer]):
    """What the monitor was asked, and has perhaps answered by now."""

    def __init__(self, reference: Any):
        self._reference = reference

    def is_answered(self) -> bool:
        """Whether the answer is there; never waits."""
        return bool(ray.wait([self._reference], timeout=0)[0])

    def answer(self, seconds: float | None = None) -> Answer:
        """The answer.

        Raises:
            RayError: there is none within this many seconds, or the driver has ended.
        """
        return cast(Answer, ray.get(self._reference, timeout=seconds))


class MonitorClient:
    """The monitor, for whoever talks to it; can be sent to other processes.

    Each method that waits takes the seconds after which it gives up, and raises RayError then.

    Args:
        handle: of the actor, which lives as long as the driver; None in a driver that has not started it yet.
    """

    def __init__(self, handle: ActorHandle | None):
        self.handle: Any = handle  # Ray makes its methods when it runs

    # -- the user and the ledger are told ------------------------------------------------------------------------------

    def say(self, message: str) -> None:
        """A line for the user."""
        self.handle.say.remote(message)

    def book(self, event: RunEvent) -> None:
        """Something happened that the ledger must know."""
        self.handle.event.remote(event.kind, event.fields())

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """As `book`, of a worker, by kind and fields of the row."""
        self.handle.event.remote(kind, fields)

    def measure(self, values: dict[str, float]) -> None:
        """What only the driver knows and TensorBoard shows."""
        self.handle.measure.remote(values)

    def ask_measured(self) -> Question[dict[str, float]]:
        """What the driver last measured."""
        return Question(self.handle.measured.remote())

    def ask_news(self, told: int, noted: int) -> Question[tuple[Status | None, list[str], list[dict[str, Any]]]]:
        """The latest status, and messages and events but for so many that the driver has."""
        return Question(self.handle.read.remote(told, noted))

    # -- how far the run is --------------------------------------------------------------------------------------------

    def update(self, status: Status) -> None:
        """The status of the run, by rank 0."""
        self.handle.update.remote(status)

    def begin(self, attempt: str) -> tuple[list[str], int | None]:
        """A group begins to train: see `Monitor.begin`."""
        return Question[tuple[list[str], int | None]](self.handle.begin.remote(attempt)).answer()

    def reached(self, seconds: float) -> int:
        """The latest global step that was ever reported."""
        return Question[int](self.handle.reached.remote()).answer(seconds)

    # -- who lives -----------------------------------------------------------------------------------------------------

    def begin_group(self, seconds: float | None = None) -> int:
        """A group starts; its number."""
        return Question[int](self.handle.begin_group.remote()).answer(seconds)

    def group(self) -> int:
        """The number of the present group."""
        return Question[int](self.handle.group.remote()).answer()

    def beat(self, beat: HeartbeatState) -> None:
        """A rank's sign of life."""
        self.handle.beat.remote(beat)

    def ask_sightings(self) -> Question[list[LastHeartbeat]]:
        """The latest sign of life of each rank."""
        return Question(self.handle.sightings.remote())

    def sightings(self, seconds: float) -> list[LastHeartbeat]:
        """The latest sign of life of each rank."""
        return self.ask_sightings().answer(seconds)

    def blame(self, finding: HangFinding) -> None:
        """Who of the present group hangs."""
        self.handle.blame.remote(finding)

    def blamed(self, seconds: float) -> HangFinding | None:
        """Who of the present group hangs, as far as is known."""
        return Question[HangFinding | None](self.handle.blamed.remote()).answer(seconds)

    def set_noticed(self, ranks: dict[int, str]) -> None:
        """Ranks of the present group whose nodes have notice -> Ray's ids of these nodes."""
        self.handle.set_noticed.remote(ranks)

    def noticed(self, seconds: float) -> dict[int, str]:
        """What `set_noticed` said last."""
        return Question[dict[int, str]](self.handle.noticed.remote()).answer(seconds)

    # -- saving together -----------------------------------------------------------------------------------------------

    def park(self, seconds: float | None = None) -> int:
        """Ask the ranks to save and wait; a ticket for this request."""
        return Question[int](self.handle.park.remote()).answer(seconds)

    def release(self, ticket: int) -> None:
        """There is nothing to wait for any more."""
        self.handle.release.remote(ticket)

    def ask_wanted(self) -> Question[int]:
        """The ticket of the request to save and wait; 0 where there is none."""
        return Question(self.handle.wanted.remote())

    def answer(self, ticket: int, saved: bool) -> None:
        """The ranks wait, and could or could not save."""
        self.handle.answer.remote(ticket, saved)

    def parked(self, ticket: int, seconds: float) -> bool | None:
        """The answer to a request.

        Returns:
            None as long as there is none.
        """
        return Question[bool | None](self.handle.parked.remote(ticket)).answer(seconds)

    def released(self, ticket: int) -> tuple[bool, int]:
        """Whether ranks that wait because of a request are free to train on; and the ticket that is wanted now."""
        asked = [self.handle.is_released.remote(ticket), self.handle.wanted.remote()]
        released, wanted = ray.get(asked)
        return released, wanted

    def saving(self, ticket: int, seconds: float) -> tuple[bool | None, Sequence[LastHeartbeat], int]:
        """The answer to a request, the ranks' signs of life, and the ticket that is wanted now."""
        asked = [self.handle.parked.remote(ticket), self.handle.sightings.remote(), self.handle.wanted.remote()]
        answer, sightings, wanted = ray.get(asked, timeout=seconds)
        return answer, sightings, wanted
