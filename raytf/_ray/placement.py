"""The placement of a group's workers: a placement group for each, on nodes that Ray has chosen for all at once.

Ray cannot take one bundle out of a placement group. It keeps those whose node is gone, and in 2.60 the GCS tries to
place them again without a pause for as long as there is a node that is large enough and has no room, which keeps a core
of the head busy until another node joins (https://github.com/ray-project/ray/pull/65007).
They count as demand as well, and those of workers that have left hold resources that nobody uses. A placement group for
each worker goes with it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from ray.train.v2._internal.execution.worker_group.placement_group_handle import PlacementGroupHandle
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from raytf._ray import state

#: Ray's label of a node with its id.
NODE_LABEL = "ray.io/node-id"
#: Seconds between two checks whether returned resources are free.
_POLL_SECONDS = 0.01
#: Ray's smallest part of a resource.
_LEAST = 1e-4


class Places(PlacementGroupHandle):
    """The placement groups of a group's workers, each of one bundle and with a number.

    Args:
        resources: of a worker.
        strategy: by which Ray chooses nodes for workers that start together.
        selectors: labels of nodes for each of the workers with which the group begins.
    """

    def __init__(self, resources: dict[str, float], strategy: str, selectors: Sequence[dict[str, str]]):
        self._resources, self._strategy, self._selectors = resources, strategy, selectors
        self._places: dict[int, PlacementGroup] = {}
        self._reserved = 0

    def of(self, numbers: Sequence[int]) -> list[PlacementGroup]:
        """Return the placement groups with some numbers, without those that were removed."""
        return [self._places[number] for number in numbers if number in self._places]

    @property
    def placement_group(self) -> Any:
        """None, as there is no group for all: Ray Train hands it to `_create_workers`, which has a number for each."""
        return None

    def ready(self) -> Any:
        raise NotImplementedError("nobody asks for it; `wait` reserves")

    def wait(self, timeout_seconds: float = 30) -> bool:
        """Reserve places for the workers with which the group begins."""
        return bool(self.reserve(self._selectors, timeout_seconds))

    def reserve(self, selectors: Sequence[dict[str, str]], seconds: float) -> list[int]:
        """Reserve places for more workers, all or none.

        Args:
            selectors: labels of nodes for each of them.
            seconds: to wait for room.

        Returns:
            Their numbers; none if there is no room.
        """
        deadline = time.monotonic() + seconds
        together = placement_group(
            [self._resources] * len(selectors), self._strategy, bundle_label_selector=list(selectors)
        )
        if not _are_ready([together], deadline):
            return []
        if len(selectors) == 1:
            return self._keep([together])
        nodes: Mapping[int, str] = placement_group_table(together)["bundles_to_node_id"]
        remove_placement_group(together)
        # A placement group that is requested sooner takes longer, since Ray retries less and less often.
        wanted = Counter(nodes.values())
        while not self._are_free(wanted) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        groups = [
            placement_group([self._resources], bundle_label_selector=[{**selector, NODE_LABEL: nodes[bundle]}])
            for bundle, selector in enumerate(selectors)
        ]
        return self._keep(groups) if _are_ready(groups, deadline) else []

    def _are_free(self, wanted: Mapping[str, int]) -> bool:
        free = state.free_resources()
        return all(
            free.get(node, {}).get(name, 0.0) >= count * amount - _LEAST
            for node, count in wanted.items()
            for name, amount in self._resources.items()
        )

    def _keep(self, places: Sequence[PlacementGroup]) -> list[int]:
        numbers = list(range(self._reserved, self._reserved + len(places)))
        self._reserved += len(places)
        self._places |= dict(zip(numbers, places, strict=True))
        return numbers

    @property
    def numbers(self) -> list[int]:
        """The numbers of all placement groups."""
        return list(self._places)

    def remove_lost(self, numbers: Sequence[int]) -> None:
        """Remove the placement groups of some numbers whose node is gone. Actors would wait for them forever."""
        about = placement_group_table()
        there = [number for number in numbers if number in self._places]
        self.remove([n for n in there if about.get(self._places[n].id.hex(), {}).get("state") != "CREATED"])

    def remove(self, numbers: Sequence[int]) -> None:
        """Return some placement groups to Ray, which ends the workers in them."""
        for number in numbers:
            if number in self._places:
                remove_placement_group(self._places.pop(number))

    def shutdown(self) -> None:
        self.remove(self.numbers)


def _are_ready(places: Sequence[PlacementGroup], deadline: float) -> bool:
    """Return whether all are created in time; otherwise remove all of them."""
    if all(place.wait(max(0.0, deadline - time.monotonic())) for place in places):
        return True
    for place in places:
        remove_placement_group(place)
    return False
