"""The leftover resources of a cluster, with their cost and the commands that remove them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from raytf.errors import one_line

#: Tag or label of each instance that Ray created. Its value is the cluster's name.
CLUSTER_TAG = "ray-cluster-name"


@dataclass(frozen=True)
class LeftResource:
    """A resource that still exists.

    Attributes:
        kind: its kind, such as `instance`.
        state: its state, as the cloud names it.
        usd: its price in US dollars per hour, 0 if it costs nothing, or None if the price is unknown.
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
        """Return whether the resource costs nothing, so that it may stay for the next `ray up`."""
        return self.usd == 0


@dataclass
class Leftovers:
    """All leftovers of a cluster.

    Attributes:
        unseen: the searches that failed, and why. If there are any, more resources may be left.
        place: the cloud, API server or hosts that were searched.
    """

    resources: list[LeftResource] = field(default_factory=list)
    unseen: list[str] = field(default_factory=list)
    place: str = ""

    @property
    def costly(self) -> list[LeftResource]:
        """Return the resources that cost, or may cost, money."""
        return [resource for resource in self.resources if not resource.is_free]


#: A query: its subject, and the function that finds resources.
Query = tuple[str, Callable[[], Iterable[LeftResource]]]


def gather(place: str, queries: Sequence[Query], explain: Callable[[Exception], str] = one_line) -> Leftovers:
    """Return the results of all queries, which run one after the other. After a failed query, the others still run."""
    left = Leftovers(place=place)
    for what, ask in queries:
        try:
            left.resources += ask()
        except Exception as problem:
            left.unseen.append(f"{what}: {explain(problem)}")
    return left
