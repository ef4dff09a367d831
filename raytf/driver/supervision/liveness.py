"""Decide which workers of a group have been silent for too long, from their signs of life between two polls."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

#: Seconds for which all members of a group may be silent at once: most stops of a process are shorter, and go by
#: without a loss then.
ALL_SILENT_SECONDS = 12.0
#: Looks without a sign of life up to which a member counts as heard; one comes between two looks, or a little later.
_HEARD_LOOKS = 2


@dataclass
class _Quiet:
    """Looks since a worker was heard: all of them, and those at which others were."""

    looks: int = 0
    missed: int = 0


class Silence:
    """Counts in polls how long each worker has been silent: while this process stands still itself, it does not poll.

    Where some members are heard, they wait for who is silent. Looks at which no member is heard count less: nobody
    waits, and without them steps are lost. A stop of all for some seconds, as of a machine that is moved, goes by.

    Args:
        most: looks for which a worker may be silent.
        most_of_all: the same where all members are.
    """

    def __init__(self, most: float, most_of_all: float):
        self._most, self._most_of_all = most, most_of_all
        self._quiet: dict[str, _Quiet] = {}

    def hear(self, name: str) -> None:
        """Take a sign of life of a worker, or its arrival."""
        self._quiet[name] = _Quiet()

    def forget(self, name: str) -> None:
        self._quiet.pop(name, None)

    def poll(self, living: Collection[str]) -> list[str]:
        """Count one more look, and return who has been silent for too long; `living` are the members that are not
        lost."""
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
