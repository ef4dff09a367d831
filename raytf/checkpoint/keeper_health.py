"""A rank's view of its node's keeper: when to ask it, when it counts as lost, and when to start another one.

Times and answers go in, and orders come out; nothing here knows Ray, processes or clocks.
"""

from __future__ import annotations

import enum

#: Seconds between two questions.
_ASK_SECONDS = 0.5
#: Seconds for which an answer counts, and after which a keeper that gives none is ended: as long as a new group waits.
FRESH_SECONDS, SILENT_SECONDS = 10.0, 20.0
#: Between two looks that are further apart it was this process that was held up, and perhaps the whole machine.
_GAP_SECONDS = 5.0
#: A keeper that lived so long is replaced at once; where keepers die sooner the next one comes later, at most so much.
STEADY_SECONDS, MOST_PAUSE_SECONDS = 60.0, 60.0


def pause(deaths: int) -> float:
    """Return the seconds before the next keeper is started, after `deaths` keepers in a row that died soon.

    The first pause is 0. Later ones double.
    """
    return 0.0 if deaths <= 1 else min(MOST_PAUSE_SECONDS, 2.0 ** min(deaths - 2, 32))


#: Seconds between tries to get memory of a node that has too little: other ranks may still hold that of the keeper
#: before.
TRY_PAUSES = tuple(pause(n + 2) for n in range(4))


class Order(enum.Enum):
    """The action after a poll of the keeper."""

    NOTHING = "nothing"
    ASK = "ask"  # the keeper what it holds
    END = "end"  # the keeper, which answers nobody and counts as lost


class KeeperHealth:
    """The health of one node's keepers, one after another.

    Args:
        now: seconds of a clock that only goes forward, as in all calls.

    Attributes:
        is_lost: whether the keeper is gone, and with it all that was copied; until `replace`.
    """

    def __init__(self, now: float):
        self.is_lost = False
        self._deaths = 0
        self.begin(now)

    def begin(self, now: float) -> None:
        """Note that a keeper has given memory."""
        self._since = self._polled_at = self._asked_at = self._heard_at = now
        self._step: int | None = None

    def poll(self, now: float, is_asking: bool) -> Order:
        """Look at the keeper.

        Args:
            is_asking: whether a question waits for its answer.
        """
        gap, self._polled_at = now - self._polled_at, now
        if gap > _GAP_SECONDS:
            self._heard_at += gap  # nobody listened for so long
        if now - self._heard_at >= SILENT_SECONDS:
            self.is_lost = True
            return Order.END
        if is_asking or now - self._asked_at < _ASK_SECONDS:
            return Order.NOTHING
        self._asked_at = now
        return Order.ASK

    def hear(self, step: int | None, now: float) -> None:
        """Note that the keeper holds the whole state after `step`; None while ranks write, which is no loss."""
        self._heard_at, self._step = now, self._step if step is None else step

    def lose(self) -> None:
        """Note that the keeper or its memory is gone."""
        self.is_lost = True

    def replace(self, now: float) -> float:
        """Note that the rank has released the lost memory, and return the seconds before it asks for other memory."""
        self._deaths = self._deaths + 1 if now - self._since < STEADY_SECONDS else 1
        self.is_lost, self._step = False, None
        return pause(self._deaths)

    def step(self, now: float) -> int | None:
        """Return the newest step that the keeper holds.

        Returns:
            None for none, and where it has not answered lately.
        """
        return self._step if not self.is_lost and now - self._heard_at < FRESH_SECONDS else None
