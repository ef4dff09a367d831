"""Messages for the user and events for the ledger, until the driver has read them."""

from __future__ import annotations

from typing import Any


class Outbox:
    """What the driver has not said that it has; and how many came before.

    Attributes:
        told, noted: messages and events that the driver has, altogether.
    """

    def __init__(self) -> None:
        self._messages: list[str] = []
        self._events: list[dict[str, Any]] = []
        self.told = 0
        self.noted = 0

    def say(self, message: str) -> None:
        """A line for the user."""
        self._messages.append(message)

    def book(self, row: dict[str, Any]) -> None:
        """A row for the ledger."""
        self._events.append(row)

    def read(self, told: int, noted: int) -> tuple[list[str], list[dict[str, Any]]]:
        """Messages and events that the reader has not got yet.

        Args:
            told, noted: messages and events that it has, altogether; they are dropped here.
        """
        del self._messages[: max(0, told - self.told)]
        del self._events[: max(0, noted - self.noted)]
        self.told, self.noted = max(told, self.told), max(noted, self.noted)
        return list(self._messages), list(self._events)
