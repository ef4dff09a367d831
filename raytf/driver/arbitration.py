"""Decides how a run's arbiter answers its workers: turns events into commands, without clocks and sockets.

`raytf.driver.arbiter` executes the commands, and `tests.stress.simulate` tests them in a simulation.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, NamedTuple

from raytf.distributed.membership.arbiter_messages import Dismiss, Join, Leave, Over, Want
from raytf.distributed.membership.generations import Generation, Membership, StaleError
from raytf.driver.supervision.liveness import Silence

#: Why a worker that members did not reach must exit.
CUT_OFF = "the other workers and this one cannot reach each other, so they continue without it"


class Tell(NamedTuple):
    """Send a message to workers; one with "generation" also needs a nonce, from which the members derive their key."""

    names: tuple[str, ...]
    message: dict[str, Any]


class HangUp(NamedTuple):
    """Close the connection to a worker, which counts as lost from now on."""

    name: str


Commands = list[Tell | HangUp]


class Arbitration:
    """Decides which messages the workers of a run get. It measures time in looks, which are calls of `poll`.

    Args:
        silence: finds silent workers, in looks.
        leave_looks: looks during which members may leave a generation after the first one has.
        most: the most members of a generation.
        refuse_looks: looks during which newcomers from a node that members did not reach are refused.
    """

    def __init__(self, silence: Silence, leave_looks: float, most: int = sys.maxsize, refuse_looks: float = math.inf):
        self._silence, self._leave_looks = silence, leave_looks
        self._membership = Membership(most, refuse_looks)
        #: Workers that have connected and are not lost.
        self._present: set[str] = set()
        #: The result of the run, once it is over.
        self._result: Any = None
        #: The number of a generation that only some members have left, and the looks since then.
        self._slow = (0, 0)

    def greeting(self) -> dict[str, Any]:
        """Return the greeting of a new worker: whether a group is running, and the result of a run that is over."""
        return {"running": self._membership.generation is not None, "over": self._result}

    def come(self, name: str) -> None:
        """Record that a worker has connected."""
        self._present.add(name)
        self._silence.hear(name)

    def hear_beat(self, name: str) -> None:
        """Record a heartbeat of a worker."""
        if name in self._present:
            self._silence.hear(name)

    def hear(self, name: str, message: Join | Leave | Dismiss | Want | Over) -> Commands:
        """Handle a message from a worker, and return the commands that follow."""
        if name not in self._present:
            return []  # it counts as lost
        self._silence.hear(name)
        match message:
            case Join() if self._result is not None:
                return [Tell((name,), {"over": self._result})]
            case Join() if self._membership.is_cut_off(name):
                return [Tell((name,), {"end": CUT_OFF, "unreachable": True})]
            case Join(place, wanted):
                return self._messages_for(self._membership.join(name, place, wanted))
            case Leave(number, place, unreached, has_met):
                try:
                    return self._messages_for(self._membership.leave(name, number, place, unreached, has_met))
                except StaleError as error:
                    return [Tell((name,), {"end": str(error)})]
            case Dismiss(names, after):
                self._membership.dismiss(names, after)
                return self._messages_for(None)
            case Want(wanted):
                return self._messages_for(self._membership.want(wanted))
            case Over(result):
                self._result = result
                return self._tell(self._membership.joining, {"over": self._result})

    def lose(self, name: str) -> Commands:
        """Record that the connection to a worker has closed, and return the commands that follow."""
        if name not in self._present:
            return []
        self._forget(name)
        return self._messages_for(self._membership.lose(name))

    def poll(self) -> Commands:
        """Return commands that hang up on workers that are silent, or that did not leave their generation in time."""
        commands: Commands = []
        self._membership.count_look()
        for name in self._silence.poll(self._membership.living):
            commands += self._let_go(name)
        missing, generation = self._membership.missing(), self._membership.generation
        number = generation.number if missing and generation is not None else 0
        self._slow = (number, self._slow[1] + 1 if number and number == self._slow[0] else 0)
        if self._slow[1] > self._leave_looks:
            for name in missing:
                commands.append(Tell((name,), {"end": f"{name} did not leave its group in time"}))
                commands += self._let_go(name)
        return commands

    def _messages_for(self, generation: Generation | None) -> Commands:
        """Return messages about the next generation, if there is one, and about the current one."""
        commands: Commands = []
        if generation is not None:
            commands += self._tell(generation.members, {"generation": asdict(generation)})
            commands += self._tell(generation.dismissed, {"dismissed": generation.number})
            commands += self._tell(generation.unreachable, {"end": CUT_OFF, "unreachable": True})
            for name in generation.unreachable:
                commands += self._let_go(name)
        present = self._membership.generation
        # The members of a finished run hang up one after another, which is no loss.
        news = self._membership.news() if self._result is None else []
        if present is not None and news:
            commands += self._tell(present.members, dict.fromkeys(news, present.number))
        return commands

    def _tell(self, names: Iterable[str], message: dict[str, Any]) -> Commands:
        here = tuple(name for name in names if name in self._present)
        return [Tell(here, message)] if here else []

    def _let_go(self, name: str) -> Commands:
        if name not in self._present:
            return []
        self._forget(name)
        return [HangUp(name), *self._messages_for(self._membership.lose(name))]

    def _forget(self, name: str) -> None:
        self._silence.forget(name)
        self._present.discard(name)
