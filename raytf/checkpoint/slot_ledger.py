"""Decisions about memory: which copies of the state belong together, which ranks own slots, when a rank copies.

The inputs are requests, and the outputs are answers and the slots to free. Nothing here uses Ray, files or time. Ranks
write into their slots directly, so only a slot's header shows that it is full. Each rank of a worker group has two
slots on its node. Names of attempts sort by the drivers' terms, then by number. Only the latest attempt that has
requested memory may reserve it, which also excludes workers of a driver that has lost the run.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

#: Number of slots of a rank.
SLOTS = 2
#: The fraction of the run time that copies in memory may cost if the user sets no cadence.
SNAPSHOT_SHARE = 0.008
#: Steps between two copies while their cost is not known.
SNAPSHOT_STEPS = 10


@dataclass(frozen=True)
class MemoryShare:
    """One rank's share of a snapshot in memory.

    Attributes:
        step: global steps that the state has seen.
        attempt: the name of the attempt that wrote it.
        share, shares: the index of this share, and the number of shares on its node.
        bytes: the size of the share.
    """

    step: int
    attempt: str
    share: int
    shares: int
    bytes: int = 0


@dataclass(frozen=True)
class HeldShare(MemoryShare):
    """A share that a node holds, and its path for processes on that node."""

    path: str = ""


@dataclass(frozen=True)
class Generation:
    """A snapshot that at least one node holds whole; `holders` maps each such node to its shares, in order."""

    step: int
    attempt: str
    holders: dict[str, list[HeldShare]]


def generations(answers: Mapping[str, Collection[HeldShare]], attempts: Collection[str] | None) -> list[Generation]:
    """Return snapshots in memory that can be restored, best first: the latest step, then the latest attempt.

    Args:
        answers: the shares that each node holds.
        attempts: this run's attempts, if they are known. Shares of other attempts belong to a run that was deleted.
    """
    whole: dict[tuple[int, str], dict[str, list[HeldShare]]] = {}
    for node, held in answers.items():
        for key in {(h.step, h.attempt) for h in held}:
            shares = {h.share: h for h in held if (h.step, h.attempt) == key}  # both slots of a rank may hold this step
            own = sorted(shares.values(), key=lambda h: h.share)
            if [h.share for h in own] == list(range(own[0].shares)) and (attempts is None or key[1] in attempts):
                whole.setdefault(key, {})[node] = own
    return [Generation(step, attempt, holders) for (step, attempt), holders in sorted(whole.items(), reverse=True)]


def is_latest(answers: Mapping[str, Collection[HeldShare]], attempts: Collection[str]) -> bool:
    """Return whether a node holds a whole copy of the latest attempt, so that nobody has to wait for other nodes.

    All nodes of an attempt copy after the same steps, so another node is at most one copy, a few steps, ahead. Names of
    attempts sort by their numbers.
    """
    return any(g.attempt == max(attempts) for g in generations(answers, attempts))


@dataclass(frozen=True)
class SlotRequest:
    """A rank's request for memory.

    Attributes:
        attempt: the name of this start of the worker group.
        share: the index of the rank among the ranks of its node.
        serial: the number of this rank's request; the same if the request is repeated because no answer arrived.
        bytes: the approximate size of a copy.
        driver: the id of the rank's driver.
    """

    attempt: str
    share: int
    serial: int
    bytes: int
    driver: str = ""


@dataclass(frozen=True)
class SlotAnswer:
    """The answer to a request.

    Attributes:
        slots: the numbers of the slots; empty if there are none.
        reason: why there are no slots.
        is_final: whether repeating the request is useless.
        paths: the slots' paths on the node, which the keeper adds.
    """

    slots: tuple[int, ...] = ()
    reason: str = ""
    is_final: bool = False
    paths: tuple[str, ...] = ()


class SlotLedger:
    """The slots of one keeper. No number is ever used for another slot.

    Attributes:
        attempt: the latest attempt that has requested memory; empty before the first.
    """

    def __init__(self) -> None:
        self.attempt = ""
        #: Bytes promised for each slot. They are allocated only when they are written.
        self._slots: dict[int, int] = {}
        #: Share -> the serial of its latest request in the latest attempt, and its slots.
        self._grants: dict[int, tuple[int, tuple[int, ...]]] = {}
        #: The driver of the latest attempt, and whether it is dead.
        self._driver, self._is_deserted = "", False
        self._next = 0

    def is_current(self, attempt: str) -> bool:
        """Return whether no later attempt than this one has requested memory."""
        return attempt >= self.attempt

    def may_reserve(self, request: SlotRequest) -> bool:
        """Return whether a request is not too late: its attempt is the latest, or the latest attempt's driver is dead.

        A run that was deleted and created again starts with the first attempt. So once the driver of the latest attempt
        is dead, the attempts of another driver may have any name.
        """
        return self.is_current(request.attempt) or (self._is_deserted and request.driver != self._driver)

    def known(self, request: SlotRequest) -> SlotAnswer | None:
        """Return the answer to a request that is repeated or too late; None for a new request."""
        if not self.may_reserve(request):
            return SlotAnswer(reason="other workers continue the run", is_final=True)
        serial, slots = self._grants.get(request.share, (0, ()))
        if request.attempt != self.attempt or request.serial > serial:
            return None
        if request.serial < serial:
            return SlotAnswer(reason="this rank has requested other memory since", is_final=True)
        return SlotAnswer(slots) if slots else None

    def make_room(self, request: SlotRequest, held: Mapping[int, HeldShare]) -> list[int]:
        """Accept a new request, and return the slots of earlier attempts to free for it, except the newest copy's.

        Args:
            request: the new request.
            held: the share in each full slot.
        """
        if request.attempt != self.attempt:
            self.attempt, self._driver, self._is_deserted, self._grants = request.attempt, request.driver, False, {}
        self._grants[request.share] = request.serial, ()
        return self._free(self._newest(held))

    def grant(self, request: SlotRequest, free_bytes: int, written: Mapping[int, int]) -> SlotAnswer:
        """Grant a request its slots if the node has enough free memory.

        Args:
            request: a request that `make_room` has accepted.
            free_bytes: the free memory of the node.
            written: the bytes that are already written, and so allocated, in each slot.
        """
        owed = sum(max(0, promised - written.get(number, 0)) for number, promised in self._slots.items())
        if SLOTS * request.bytes > free_bytes - owed:
            size = f"{request.bytes / 2**20:,.0f} MiB"
            return SlotAnswer(reason=f"two copies of {size} do not fit into the node's free memory")
        slots = tuple(range(self._next, self._next + SLOTS))
        self._next += SLOTS
        self._slots |= dict.fromkeys(slots, request.bytes)
        self._grants[request.share] = request.serial, slots
        return SlotAnswer(slots)

    def tidy(self, held: Mapping[int, HeldShare]) -> list[int]:
        """Return the slots of earlier attempts to free: all, except their newest copy while it is needed."""
        return self._free(self._newest(held))

    def is_tidy(self, attempt: str) -> bool:
        """Return whether no slots of earlier attempts are left, or another attempt continues the run."""
        return attempt != self.attempt or self._slots.keys() <= self._granted()

    def desert(self) -> None:
        self._is_deserted = True

    def _granted(self) -> set[int]:
        return {number for _, slots in self._grants.values() for number in slots}

    def _newest(self, held: Mapping[int, HeldShare]) -> set[int]:
        """Return the slots of the newest whole copy of the latest attempt or, if it has none, of an earlier one.

        Replaced workers may complete a copy late, and its step may be later than those of the latest attempt.
        """
        whole = generations({"": held.values()}, None)
        newest = max(whole, key=lambda g: (g.attempt == self.attempt, g.attempt, g.step), default=None)
        shares = set() if newest is None else set(newest.holders[""])
        return {number for number, share in held.items() if share in shares}

    def _free(self, kept: set[int]) -> list[int]:
        freed = sorted(self._slots.keys() - self._granted() - kept)
        for number in freed:
            del self._slots[number]
        return freed


def snapshot_every(asked: int | None, copy_seconds: float, step_seconds: float) -> int:
    """Return the number of steps between two copies in memory; 0 for no copies.

    Args:
        asked: the number that the user set; None to limit copying to SNAPSHOT_SHARE of the time.
        copy_seconds: how long one copy stops training; 0 if it is not known yet.
        step_seconds: how long one step takes; 0 if it is not known yet.
    """
    if asked is not None:
        return asked
    if not (copy_seconds and step_seconds):
        return SNAPSHOT_STEPS
    return max(1, math.ceil(copy_seconds / (SNAPSHOT_SHARE * step_seconds)))


class CopyTurns:
    """Alternates a rank's two slots. A copy never uses the slot of the newest copy that all ranks have completed.

    Attributes:
        copied: step of this rank's newest copy; None if there is none.
        asked: step of the newest requested copy, even on a rank without memory.
        is_settled: whether the ranks have agreed to commit or to drop that copy.
    """

    def __init__(self) -> None:
        self.copied: int | None = None
        self.asked: int | None = None
        self.is_settled = True
        self._next = 0
        self._is_aborted = False

    def is_pending(self, step: int) -> bool:
        """Return whether the newest copy is of another step, and the ranks have not agreed on it yet.

        If so, a copy of `step` has to wait. Otherwise a rank could drop its older copy before another rank's newer copy
        is complete, and no step would have copies of all ranks. A copy of the same step only replaces the newest one.
        """
        return not self.is_settled and self.asked != step

    def ask(self, step: int) -> None:
        self.asked, self.is_settled = step, False

    def take(self, step: int) -> int:
        """Return the slot, 0 or 1, into which to copy the state after a step. A second copy of the same step overwrites
        the first, so that the copy of the earlier step is kept until the new one is complete on all ranks."""
        if step != self.copied or self._is_aborted:
            slot, self._next = self._next, 1 - self._next
        else:
            slot = 1 - self._next
        self.copied, self._is_aborted = step, False
        return slot

    def commit(self) -> None:
        """Record that the newest copy is complete on all ranks. The previous copy is kept until the next one."""
        self.is_settled = True

    def abort(self) -> None:
        """Discard the newest copy. The next copy uses its slot, and the copy before it is kept until then."""
        self.is_settled = True
        if self.copied is not None and not self._is_aborted:
            self._next, self._is_aborted = 1 - self._next, True

    def lose(self) -> None:
        self.copied, self._next, self._is_aborted = None, 0, False
