"""Client of the driver's monitor for all processes of a run: its workers, Ray Train's controller, and the driver.

Methods that only send something never wait. Other methods wait for the answer, or return a `Question` whose answer is
fetched later.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, Generic, TypeVar, cast

import ray
from ray.actor import ActorHandle

from raytf.runs.events import RunEvent
from raytf.runs.program_output import ProgramOutput
from raytf.runs.status import Status
from raytf.training.process.heartbeat_types import HangFinding, HeartbeatState, LastHeartbeat

Answer = TypeVar("Answer")
#: Steps after which states are invalid, each with the names of the attempts that made them.
VoidRows = list[tuple[int, list[str]]]


class Question(Generic[Answer]):
    """A request to the monitor, whose answer may still be pending."""

    def __init__(self, reference: Any):
        self._reference = reference

    def is_answered(self) -> bool:
        """Return whether the answer has arrived, without waiting."""
        return bool(ray.wait([self._reference], timeout=0)[0])

    def answer(self, seconds: float | None = None) -> Answer:
        """Wait for the answer.

        Args:
            seconds: timeout; None for no timeout.

        Raises:
            RayError: no answer arrived in time, or the driver has exited.
        """
        return cast(Answer, ray.get(self._reference, timeout=seconds))


class MonitorClient:
    """Client of the monitor; can be sent to other processes.

    A method that waits and has an argument `seconds` raises RayError after that many seconds.

    Args:
        handle: handle of the actor, which lives as long as the driver; None in a driver that has not started it yet.
    """

    def __init__(self, handle: ActorHandle | None):
        self.handle: Any = handle  # Ray adds its methods at run time

    # -- messages and events -------------------------------------------------------------------------------------------

    def say(self, message: str | ProgramOutput) -> None:
        """Print a line for the user, or pass on what the program's code printed."""
        self.handle.say.remote(message)

    def stage(self, text: str) -> None:
        """Show a stage of the start until the next status."""
        self.handle.stage.remote(text)

    def book(self, event: RunEvent) -> None:
        self.handle.event.remote(event.kind, event.fields())

    def event(self, kind: str, fields: dict[str, Any]) -> None:
        """Record an event from a worker, as `book` does, but given as the kind and the fields of its row."""
        self.handle.event.remote(kind, fields)

    def measure(self, values: dict[str, float]) -> None:
        """Send values that only the driver knows, for TensorBoard."""
        self.handle.measure.remote(values)

    def ask_measured(self) -> Question[dict[str, float]]:
        """Ask for the values that the driver last sent with `measure`."""
        return Question(self.handle.measured.remote())

    def ask_news(
        self, seen: int, noted: int
    ) -> Question[tuple[Status | str, list[str | ProgramOutput], list[dict[str, Any]]]]:
        """Ask for the latest status, or the stage while there is none, and for new messages and events.

        Args:
            seen: number of messages that the driver already has.
            noted: number of events that the driver already has.
        """
        return Question(self.handle.read.remote(seen, noted))

    # -- progress ------------------------------------------------------------------------------------------------------

    def update(self, status: Status) -> None:
        """Send the status of the run, from rank 0."""
        self.handle.update.remote(status)

    def begin(self, attempt: str) -> tuple[list[str], int | None, bool, VoidRows, dict[str, tuple[int, int]]]:
        """Announce that a group begins to train.

        Returns:
            The earlier attempts, the step of the newest checkpoint in storage (0 for none, None if nobody has checked),
            whether a later checkpoint may be in storage, the invalid states, and the standings of nodes. See
            `Monitor.begin` and `GroupHistory.for_new_ranks`.
        """
        earlier, step = ray.get(self.handle.begin.remote(attempt))
        # Only now: Ray resends unanswered calls to a restarted monitor in any order, and a commit may come in between.
        is_saving, (void, standings) = ray.get([self.handle.is_saving.remote(), self.handle.past.remote()])
        return earlier, step, is_saving, void, standings

    def commits(self, step: int, seconds: float) -> None:
        """Report that a step's checkpoint is about to be complete, and wait up to `seconds` until the driver knows."""
        with contextlib.suppress(ray.exceptions.RayError):
            Question[None](self.handle.commits.remote(step)).answer(seconds)

    def is_over(self, attempt: str, seconds: float) -> bool:
        """Return whether another group has begun to train after this attempt; False if no answer arrives in time."""
        try:
            return Question[bool](self.handle.is_over.remote(attempt)).answer(seconds)
        except ray.exceptions.RayError:
            return False

    def go_back(self, after: int, attempts: Sequence[str]) -> None:
        """Report that these attempts' states after a step are invalid. Waits, as this process is about to exit."""
        Question[None](self.handle.go_back.remote(after, list(attempts))).answer()

    def stand(self, node: str, process: int, joined: int, vouched: int) -> None:
        """Report the step at which a node's process joined, and the last step at which an audit confirmed it."""
        self.handle.stand.remote(node, process, joined, vouched)

    def reached(self, seconds: float) -> int:
        """Return the highest global step that was ever reported in this run."""
        return Question[int](self.handle.reached.remote()).answer(seconds)

    def durable(self, seconds: float) -> int | None:
        """Return the step of the newest checkpoint in storage; 0 for none, None if nobody has checked."""
        return Question[int | None](self.handle.durable.remote()).answer(seconds)

    # -- heartbeats ----------------------------------------------------------------------------------------------------

    def begin_group(self, seconds: float | None = None) -> int:
        """Announce that a group starts, and return its number."""
        return Question[int](self.handle.begin_group.remote()).answer(seconds)

    def group(self) -> int:
        return Question[int](self.handle.group.remote()).answer()

    def beat(self, beat: HeartbeatState) -> None:
        """Send a rank's heartbeat."""
        self.handle.beat.remote(beat)

    def forget(self, ranks: list[int]) -> None:
        """Report that other workers now have these ranks of the current group."""
        self.handle.forget.remote(ranks)

    def ask_sightings(self) -> Question[list[LastHeartbeat]]:
        """Ask for the latest heartbeat of each rank."""
        return Question(self.handle.sightings.remote())

    def sightings(self, seconds: float) -> list[LastHeartbeat]:
        """Return the latest heartbeat of each rank."""
        return self.ask_sightings().answer(seconds)

    def blame(self, finding: HangFinding) -> None:
        """Report which ranks of the current group hang."""
        self.handle.blame.remote(finding)

    def blamed(self, seconds: float) -> HangFinding | None:
        """Return which ranks of the current group hang.

        Returns:
            None if none is known to hang.
        """
        return Question[HangFinding | None](self.handle.blamed.remote()).answer(seconds)

    def set_noticed(self, ranks: dict[int, str]) -> None:
        """Report the ranks of the current group whose nodes have a preemption notice.

        Args:
            ranks: rank -> Ray's id of its node.
        """
        self.handle.set_noticed.remote(ranks)

    def noticed(self, seconds: float) -> dict[int, str]:
        """Return the ranks that `set_noticed` last reported."""
        return Question[dict[int, str]](self.handle.noticed.remote()).answer(seconds)

    def seconds_left(self, node: str, seconds: float) -> float | None:
        """Return the seconds until a node is preempted, as its own workers reported; None if they reported nothing."""
        return Question[float | None](self.handle.seconds_left.remote(node)).answer(seconds)

    # -- saving together -----------------------------------------------------------------------------------------------

    def park(self, seconds: float | None = None, is_stop: bool = False) -> int:
        """Ask the ranks to save and wait, and return a ticket for this request; see `Parking.park`."""
        return Question[int](self.handle.park.remote(is_stop)).answer(seconds)

    def release(self, ticket: int) -> None:
        """Let the ranks that wait because of this request continue to train."""
        self.handle.release.remote(ticket)

    def ask_wanted(self) -> Question[int]:
        """Ask for the ticket of the current request to save and wait; 0 if there is none."""
        return Question(self.handle.wanted.remote())

    def answer(self, ticket: int, saved: bool) -> None:
        """Report that the ranks wait because of a request, and whether they could save."""
        self.handle.answer.remote(ticket, saved)

    def parked(self, ticket: int, seconds: float) -> bool | None:
        """Return the answer to a request: whether the ranks could save.

        Returns:
            None as long as there is no answer.
        """
        return Question[bool | None](self.handle.parked.remote(ticket)).answer(seconds)

    def released(self, ticket: int) -> tuple[bool, int]:
        """Return whether ranks that wait because of a request may continue, and the ticket of the current request."""
        asked = [self.handle.is_released.remote(ticket), self.handle.wanted.remote()]
        released, wanted = ray.get(asked)
        return released, wanted

    def saving(self, ticket: int, seconds: float) -> tuple[bool | None, Sequence[LastHeartbeat], int]:
        """Return the answer to a request, the latest heartbeat of each rank, and the ticket of the current request."""
        asked = [self.handle.parked.remote(ticket), self.handle.sightings.remote(), self.handle.wanted.remote()]
        answer, sightings, wanted = ray.get(asked, timeout=seconds)
        return answer, sightings, wanted
