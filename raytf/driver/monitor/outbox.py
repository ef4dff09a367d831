"""Messages for the user and events for the ledger, until the driver has read them."""

from __future__ import annotations

from typing import Any

from raytf.runs.program_output import ProgramOutput


class Outbox:
    """What the driver has not confirmed yet, and how many items came before.

    Attributes:
        told: messages that the driver has, in total.
        noted: events that the driver has, in total.
    """

    def __init__(self) -> None:
        self._messages: list[str | ProgramOutput] = []
        self._events: list[dict[str, Any]] = []
        self.told = 0
        self.noted = 0

    def say(self, message: str | ProgramOutput) -> None:
        """Add a line for the user, or output of the program's code."""
        self._messages.append(message)

    def book(self, row: dict[str, Any]) -> None:
        """Add a row for the ledger."""
        self._events.append(row)

    def read(self, told: int, noted: int) -> tuple[list[str | ProgramOutput], list[dict[str, Any]]]:
        """Messages and events that the reader does not have yet.

        Args:
            told: messages that it has, in total; they are dropped here.
            noted: events that it has, in total; they are dropped here.
        """
        del self._messages[: max(0, told - self.told)]
        del self._events[: max(0, noted - self.noted)]
        self.told, self.noted = max(told, self.told), max(noted, self.noted)
        return list(self._messages), list(self._events)
