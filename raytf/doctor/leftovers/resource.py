"""A resource that is left of a cluster, its cost, and the command that removes it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from raytf.errors import one_line

#: Tag or label of each instance that Ray has made: the name of its cluster.
CLUSTER_TAG = "ray-cluster-name"
#: Hours of a month, as the clouds reckon.
HOURS = 730
#: US dollars a GB and month of disks, of the month of machines.PRICES_OF, in the regions of that table.
DISK_USD = {
    "gp2": 0.10,
    "gp3": 0.08,
    "io1": 0.125,
    "io2": 0.125,
    "st1": 0.045,
    "sc1": 0.015,
    "standard": 0.05,
    "pd-standard": 0.04,
    "pd-balanced": 0.10,
    "pd-ssd": 0.17,
    "hyperdisk-balanced": 0.08,
    "Standard_LRS": 0.046,
    "StandardSSD_LRS": 0.075,
    "Premium_LRS": 0.154,
}
#: US dollars an hour of a public address.
ADDRESS_USD = 0.005


@dataclass(frozen=True)
class LeftResource:
    """A resource that is still there.

    Attributes:
        kind: such as `instance`.
        state: in the cloud's own words.
        usd: US dollars an hour; None if the price is not known; 0 for what costs nothing.
        remove: the command that removes it.
    """

    kind: str
    name: str
    state: str
    usd: float | None
    remove: str
    note: str = ""

    @property
    def is_free(self) -> bool:
        """Return whether it costs nothing: it may stay for the next `ray up`."""
        return self.usd == 0


@dataclass
class Leftovers:
    """All that is left of a cluster.

    Attributes:
        unseen: what could not be inspected, and why. If there is any, nothing is proven.
        place: the cloud, API server or hosts that were searched.
    """

    resources: list[LeftResource] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    place: str = ""

    @property
    def costly(self) -> list[LeftResource]:
        """Return what costs money, or may."""
        return [resource for resource in self.resources if not resource.is_free]


#: A query: its subject, and what finds resources.
Query = tuple[str, Callable[[], Iterable[LeftResource]]]


def gather(place: str, queries: Sequence[Query], explain: Callable[[Exception], str] = one_line) -> Leftovers:
    """Run one query after the other. A query that fails does not keep the others from being run."""
    left = Leftovers(place=place)
    for what, ask in queries:
        try:
            left.resources += ask()
        except Exception as problem:
            left.unseen.append(f"{what}: {explain(problem)}")
    return left


def disk_usd(kind: str, gib: float) -> float | None:
    """Return the US dollars an hour of a disk."""
    price = DISK_USD.get(kind)
    return None if price is None else round(price * gib / HOURS, 5)
