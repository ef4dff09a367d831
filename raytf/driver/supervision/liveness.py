"""Decide which workers of a group have been silent for too long, from their heartbeats between polls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

#: Seconds for which all members of a group may be silent at once. Most pauses of a process are shorter, and then no
#: member is lost.
ALL_SILENT_SECONDS = 12.0
#: Polls without a heartbeat up to which a member counts as heard, because a heartbeat may arrive a little late.
_HEARD_LOOKS = 2


@dataclass
class _Quiet:
    """Polls since a worker's last heartbeat: `looks` counts all, `missed` those at which others were heard."""

    looks: int = 0
    missed: int = 0


class Silence:
    """Counts in polls how long each worker has been silent. While this process itself is paused, it does not poll.

    While some members are heard, they wait for the silent ones. While no member is heard, nobody waits, and dropping
    them would lose steps, so the higher limit applies. A pause of all members, as in a live migration, is tolerated.

    Args:
        most: polls for which a worker may be silent while others are heard.
        most_of_all: polls for which all members may be silent.
    """

    def __init__(self, most: float, most_of_all: float):
        self._most, self._most_of_all = most, most_of_all
        self._quiet: dict[str, _Quiet] = {}

    def hear(self, name: str) -> None:
        """Record a heartbeat of a worker, or that it has joined."""
        self._quiet[name] = _Quiet()

    def forget(self, name: str) -> None:
        self._quiet.pop(name, None)

    def poll(self, living: Collection[str]) -> list[str]:
        """Count a poll, and return the workers that were silent for too long; `living` are the members not yet lost."""
        for quiet in self._quiet.values():
            quiet.looks += 1
        are_heard = any(name in self._quiet and self._quiet[name].looks <= _HEARD_LOOKS for name in living)
        for name, quiet in self._quiet.items():
            quiet.missed += are_heard or name not in living
        return [
            name
            for name, quiet in self._quiet.items()
            if quiet.missed > self._most or (quiet.looks > self._most_of_all and not are_heard)
        ]
