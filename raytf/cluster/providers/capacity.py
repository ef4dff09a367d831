"""Tries the next offer of a cloud if one has no capacity, and skips empty offers for a while."""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raytf.errors import one_line

#: Seconds to skip an offer that a place does not have at all, which does not change within minutes.
LONG_SECONDS = 900.0
#: AWS, "Error codes for the Amazon EC2 API": after these, another zone may have capacity.
_AWS_HERE = {
    *("InsufficientCapacity", "InsufficientHostCapacity", "InsufficientInstanceCapacity"),
    *("InsufficientReservedInstanceCapacity", "SpotMaxPriceTooLow"),
}
#: These codes last longer than minutes.
_AWS_LASTING = {"InsufficientFreeAddressesInSubnet", "Unsupported"}
#: These codes mean quotas of the account in the region.
_AWS_QUOTAS = {"InstanceLimitExceeded", "MaxSpotInstanceCountExceeded", "VcpuLimitExceeded"}
#: Compute Engine, "Troubleshooting resource availability errors", and Cloud TPU: (pattern, everywhere, lasting).
_GCP = (
    (r"ZONE_RESOURCE_POOL_EXHAUSTED(_WITH_DETAILS)?", False, False),
    (r"QUOTA_EXCEEDED|quotaExceeded", True, False),
    (r"no more capacity in the zone|RESOURCE_EXHAUSTED", False, False),
    (r"does not exist in zone", False, True),
)
#: Azure, "Resolve allocation failures" and "Resolve errors for SKU not available".
_AZURE = (
    (r"ZonalAllocationFailed|OverconstrainedZonalAllocationRequest", False, False),
    (r"AllocationFailed|OverconstrainedAllocationRequest", False, False),
    (r"SkuNotAvailable", False, True),
    (r"No available zones for VM size", False, True),  # Ray's own text
    (r"QuotaExceeded", True, False),
    (r"exceeding approved [\w ]*quota", True, False),
)


@dataclass(frozen=True)
class CapacityOffer:
    """A machine in a place, which a cloud may be able to launch.

    Attributes:
        machine: its type and market, for messages; quotas apply to it in all places.
        place: zone or subnet; empty if the cloud chooses.
        config: node_config to launch.
        at_most: the most nodes of the node type that may use this machine; None for no limit.
        kind: the machine without its market.
    """

    machine: str
    place: str = ""
    config: Mapping[str, Any] = field(default_factory=dict, compare=False)
    at_most: int | None = None
    kind: str = ""

    def __str__(self) -> str:
        return f"{self.machine} in {self.place}" if self.place else self.machine


@dataclass(frozen=True)
class Shortage:
    """The reason why an offer has no capacity, though another offer may.

    Attributes:
        code: the cloud's error code.
        everywhere: whether it applies to the machine in all places, as a quota does.
        lasting: whether it lasts for more than minutes.
    """

    code: str
    everywhere: bool = False
    lasting: bool = False


class NoCapacity(Exception):
    """A cloud has no capacity for an offer; `nodes` are the nodes that it launched nevertheless."""

    def __init__(self, shortage: Shortage, description: str, nodes: Mapping[str, Any] | None = None):
        super().__init__(f"{shortage.code}: {description}")
        self.shortage, self.description, self.nodes = shortage, description, dict(nodes or {})


class EmptyPools:
    """The offers that were empty, and the time until which each is not tried again. Safe for several threads.

    Args:
        hold_seconds: seconds without a retry after a shortage that may end soon.
        clock: returns monotonic seconds.
    """

    def __init__(self, hold_seconds: float, clock: Callable[[], float]):
        self._hold, self._clock = hold_seconds, clock
        #: (place, kind) -> when the place last had too few machines of the kind.
        self._short_at: dict[tuple[str, str], float] = {}
        self._until: dict[tuple[str, str | None], tuple[float, str]] = {}
        #: Offer -> since when each try has returned too few nodes, and the time of the last try.
        self._lacking: dict[CapacityOffer, tuple[float, float]] = {}
        self._lock = threading.Lock()

    def put(self, offer: CapacityOffer, shortage: Shortage) -> None:
        """Record that an offer had no capacity just now."""
        seconds = max(self._hold, LONG_SECONDS) if shortage.lasting else self._hold
        with self._lock:
            now = self._clock()
            self._short_at[(offer.place, offer.kind)] = now
            self._lacking[offer] = (self._since(offer, now), now)
            self._until[(offer.machine, None if shortage.everywhere else offer.place)] = now + seconds, shortage.code

    def gave(self, offer: CapacityOffer) -> None:
        """Record that an offer had all requested nodes just now."""
        with self._lock:
            self._lacking.pop(offer, None)

    def lacking_seconds(self, offer: CapacityOffer) -> float:
        """Return for how many seconds each try of an offer has returned too few nodes; 0 after a pause in the tries."""
        with self._lock:
            now = self._clock()
            return now - self._since(offer, now)

    def _since(self, offer: CapacityOffer, now: float) -> float:
        first, last = self._lacking.get(offer, (now, now))
        return first if now - last <= 2 * max(self._hold, LONG_SECONDS) else now

    def seconds(self, offer: CapacityOffer) -> float:
        """Return for how many more seconds an offer must not be tried; 0 if it may be tried now."""
        return self._held(offer)[0]

    def code(self, offer: CapacityOffer) -> str:
        """Return the cloud's code for the reason why an offer must not be tried."""
        return self._held(offer)[1]

    def was_short(self, offer: CapacityOffer) -> bool:
        """Return whether an offer's place had too few machines of its kind within the last 15 minutes."""
        with self._lock:
            at = self._short_at.get((offer.place, offer.kind))
            return at is not None and self._clock() - at < LONG_SECONDS

    def _held(self, offer: CapacityOffer) -> tuple[float, str]:
        with self._lock:
            now = self._clock()
            holds = [self._until.get((offer.machine, place), (-math.inf, "")) for place in (offer.place, None)]
        until, code = max(holds)
        return max(0.0, until - now), code


def slug(text: str) -> str:
    """Return a text as a label that all clouds accept."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60]


def together(
    offers: Sequence[CapacityOffer],
    places: Iterable[str],
    kinds: Iterable[str],
    empty: EmptyPools,
    room: Callable[[CapacityOffer], float] = lambda offer: math.inf,
) -> list[CapacityOffer]:
    """Return the offers that keep nodes in one place and of one kind, in order.

    If no node runs, offers that recently had too few machines come last: their nodes were not enough, and have stopped.
    If nodes run, and the offers next to them have had too few for a quarter of an hour, the other offers are appended:
    otherwise, a run would wait, and pay, for as long as a node runs.

    Args:
        offers: all offers, in the order in which they are tried.
        places, kinds: places and kinds of the running nodes, as `slug` returns them.
        empty: offers without capacity.
        room: returns how many nodes of an offer's machine may be added.
    """
    place, kind = _most_common(places), _most_common(kinds)
    beside = [o for o in offers if place in (None, slug(o.place)) and kind in (None, slug(o.kind))]
    if place is None and kind is None:
        beside.sort(key=empty.was_short)
    elif beside and all(room(offer) <= 0 or empty.lacking_seconds(offer) >= LONG_SECONDS for offer in beside):
        others = [offer for offer in offers if offer not in beside]
        beside += sorted(others, key=lambda offer: kind not in (None, slug(offer.kind)))
    return beside or list(offers)  # after a change of the cluster's config, no offer may match the nodes


def _most_common(names: Iterable[str]) -> str | None:
    counted = Counter(names).most_common(1)
    return counted[0][0] if counted else None


def obtain(
    offers: Sequence[CapacityOffer],
    count: int,
    launch: Callable[[CapacityOffer, int], Mapping[str, Any]],
    empty: EmptyPools,
    room: Callable[[CapacityOffer], float],
    say: Callable[[str], None],
    is_spread: bool = True,
    where: str = "anywhere",
) -> dict[str, Any]:
    """Launch nodes from the first offers that have capacity.

    Never launch more than `count` in all: the next offer is tried only after the cloud has reported how many nodes the
    last one had. If `launch` raises another error, return the nodes of earlier offers, or raise it if there are none.

    Args:
        offers: the offers, in the order in which they are tried.
        count: the number of nodes, 1 or more.
        launch: launches a number of nodes from an offer and returns them, which may be fewer; raises NoCapacity.
        empty: offers without capacity, to which this call adds its own.
        room: returns how many nodes of an offer's machine may be added.
        say: called with a line for the user.
        is_spread: whether nodes may come from several places and be of several kinds.
        where: the places of the offers, for messages.

    Returns:
        The nodes by their ids: at least one, at most `count`.

    Raises:
        NoCapacity: no offer has capacity.
    """
    nodes: dict[str, Any] = {}
    left = {offer.machine: room(offer) for offer in offers}
    first = ""
    chosen: CapacityOffer | None = None
    for offer in offers:
        if chosen is not None and not is_spread and (offer.place, offer.kind) != (chosen.place, chosen.kind):
            continue
        wanted = int(min(count - len(nodes), left[offer.machine]))
        if wanted <= 0 or empty.seconds(offer) > 0:
            continue
        lack = None
        try:
            launched = dict(launch(offer, wanted))
        except NoCapacity as error:
            launched, lack = error.nodes, error
        except Exception as error:
            if not nodes:
                raise
            # Return the launched nodes, or Ray would request them again.
            say(f"{len(nodes)} of {count} started; {offer} failed: {one_line(error, 200)}")
            return nodes
        nodes |= launched
        chosen = offer if launched else chosen
        left[offer.machine] -= len(launched)
        if launched and first:
            say(f"{len(launched)} x {offer} started instead of {first}")
        if lack is None and len(launched) >= wanted:
            empty.gave(offer)
        else:
            shortage = lack.shortage if lack is not None else Shortage("fewer than asked for")
            empty.put(offer, shortage)
            first = first or str(offer)
            say(f"no capacity for {wanted - len(launched)} x {offer} ({shortage.code})")
        if len(nodes) >= count:
            return nodes
    allowed = [offer for offer in offers if left[offer.machine] > 0]
    seconds = math.ceil(min((empty.seconds(offer) for offer in allowed), default=0.0))
    again = f"asked again in {seconds} s" if allowed else "no more are allowed"
    if nodes:
        say(f"{len(nodes)} of {count} started; {again}")
        return nodes
    reasons = {str(o): empty.code(o) if o in allowed else f"{o.at_most} run, at_most is {o.at_most}" for o in offers}
    text = f"no capacity {where}; {again}: " + ", ".join(f"{name} ({why})" for name, why in reasons.items())
    if first:
        say(text)
    raise NoCapacity(Shortage("NoCapacity"), text)


def aws_shortage(code: str) -> Shortage | None:
    """Return the shortage that an error's code stands for, or None if the code means no shortage."""
    if code in _AWS_HERE or code in _AWS_LASTING:
        return Shortage(code, lasting=code in _AWS_LASTING)
    return Shortage(code, everywhere=True) if code in _AWS_QUOTAS else None


def gcp_shortage(text: str) -> Shortage | None:
    """Return the shortage that the text of an operation's error or of an HTTP error stands for, or None."""
    return _match(text, _GCP)


def azure_shortage(text: str) -> Shortage | None:
    """Return the shortage that the text of a deployment's error stands for, or None."""
    return _match(text, _AZURE)


def text_of(error: BaseException) -> str:
    """Return the whole text of a client library's error, with details that its own message may omit."""
    inner = getattr(error, "error", None)
    content = getattr(error, "content", b"")
    parts = [str(error), content.decode(errors="replace") if isinstance(content, bytes) else str(content)]
    return " ".join([*parts, *_details(inner)])


def _details(error: object, depth: int = 5) -> list[str]:
    """Return the codes and messages of an Azure error and of its nested errors."""
    if error is None or not depth:
        return []
    texts = [str(getattr(error, key)) for key in ("code", "message") if getattr(error, key, None)]
    for below in getattr(error, "details", None) or ():
        texts += _details(below, depth - 1)
    return texts


def _match(text: str, table: tuple[tuple[str, bool, bool], ...]) -> Shortage | None:
    for pattern, everywhere, lasting in table:
        match = re.search(pattern, text)
        if match:
            return Shortage(match[0], everywhere, lasting)
    return None
