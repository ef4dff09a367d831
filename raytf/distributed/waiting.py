"""Which of the processes that a rank waits for in a sum are lost: a decision from looks at them.

A sum asks only now and then, while nothing comes. Silence is counted in looks of this process: while it stood still
itself, it has not looked. `host_allreduce` looks at the processes of its host and `network_allreduce` at heartbeats of
other hosts; `tests.stress.simulate` tries both in a simulated world.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import Enum
from typing import NamedTuple

from raytf.distributed.heartbeat_sender import BEAT_SECONDS, SILENT_SECONDS

#: Seconds between two looks at a process of this host.
PROCESS_LOOK_SECONDS = 1.0
#: Seconds for which a process may be stopped; as long as TensorFlow waits for a heartbeat.
STOPPED_SECONDS = 6.0


class Sign(Enum):
    """What a look shows of a process."""

    ALIVE = "alive"
    #: It is stopped, or sends no heartbeats.
    QUIET = "quiet"
    GONE = "gone"


class Loss(NamedTuple):
    """Why a sum cannot end.

    Attributes:
        number: of the process that is lost; None for an unknown one of the group.
        sign: the look that has shown it.
    """

    number: int | None
    sign: Sign


class Waiting:
    """Decides whether processes that are waited for are lost.

    Args:
        looks: in how many looks, one after the other, a process that is lost was quiet.
    """

    def __init__(self, looks: int):
        self._looks = looks
        self._quiet: dict[int, int] = {}

    @classmethod
    def for_processes(cls, stopped_seconds: float = STOPPED_SECONDS) -> Waiting:
        """For processes of this host, with a look every `PROCESS_LOOK_SECONDS`.

        Args:
            stopped_seconds: how long a process may be stopped.
        """
        return cls(math.ceil(stopped_seconds / PROCESS_LOOK_SECONDS))

    @classmethod
    def for_heartbeats(cls, silent_seconds: float = SILENT_SECONDS) -> Waiting:
        """For processes that send heartbeats, with a look every `BEAT_SECONDS`.

        Args:
            silent_seconds: how long a process may send none; a look more, since the newest may be on its way.
        """
        return cls(math.floor(silent_seconds / BEAT_SECONDS) + 1)

    def look(self, signs: Mapping[int, Sign], is_broken: bool = False) -> Loss | None:
        """Return a loss, for which the sum cannot end; None while the processes are to be waited for.

        Args:
            signs: of the processes that are waited for, by their numbers.
            is_broken: whether a process of the group is known to be lost. That counts also for those that this host
                does not show, as between containers.
        """
        for number, sign in signs.items():
            if sign is Sign.GONE:  # a child that it has forked may hold its socket
                return Loss(number, sign)
        if is_broken:
            return Loss(None, Sign.GONE)
        for number, sign in signs.items():
            self._quiet[number] = self._quiet.get(number, 0) + 1 if sign is Sign.QUIET else 0
            if self._quiet[number] >= self._looks:
                return Loss(number, sign)
        return None


def sign_of_process(state: str, started: str, began: str) -> Sign:
    """Return what the system's table of processes shows of a process.

    Args:
        state: the process's state there; empty if it is not visible.
        started: when the process with its number started: another one may have got its number.
        began: when it had started at the first look; empty if it was never visible, which says nothing.
    """
    if began and (state in ("", "Z", "X") or started != began):
        return Sign.GONE
    return Sign.QUIET if state in ("T", "t") else Sign.ALIVE
