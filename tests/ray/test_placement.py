"""Places of workers on a cluster whose nodes go: nothing of one that is gone stays with Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from raytf._ray.partial_group import Places
from raytf.testing import ElasticCluster
from raytf.testing.processes import wait_until

PATIENCE = 60.0


@contextmanager
def connected(cluster: ElasticCluster) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as env:
        for name, value in cluster.env.items():
            env.setenv(name, value)
        ray.init(address=cluster.env["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
        try:
            yield
        finally:
            ray.shutdown()


def states() -> list[str]:
    """Of all placement groups that hold or want something."""
    found = [about["state"] for about in placement_group_table().values()]
    return [state for state in found if state != "REMOVED"]


@ray.remote(num_cpus=1)
class Actor:
    def node(self) -> str:
        return ray.get_runtime_context().get_node_id()


def test_each_worker_has_a_place_that_goes_with_its_node():
    with ElasticCluster(nodes=2) as cluster, connected(cluster):
        places = Places({"CPU": 1.0}, "PACK", [{}, {}])
        assert places.wait(PATIENCE)
        assert places.numbers == [0, 1]
        actors = [
            Actor.options(scheduling_strategy=PlacementGroupSchedulingStrategy(p)).remote() for p in places.of([0, 1])
        ]
        nodes = ray.get([actor.node.remote() for actor in actors])
        assert set(nodes) == {node.id for node in cluster.nodes}

        # There is no room for another one: nothing of it stays.
        assert places.reserve([{}], 0.5) == []
        assert states() == ["CREATED", "CREATED"]

        gone = next(node for node in cluster.nodes if node.id == nodes[1])
        gone.kill()
        wait_until(lambda: sorted(states()) == ["CREATED", "RESCHEDULING"], "Ray knows that the node is gone", PATIENCE)
        places.remove_lost([0, 1])
        assert (places.numbers, states()) == ([0], ["CREATED"])
        assert ray.get(actors[0].node.remote()) == nodes[0]

        cluster.add_node()
        (number,) = places.reserve([{}], PATIENCE)
        assert number == 2, "a number is not given twice"
        places.shutdown()
        assert states() == []
