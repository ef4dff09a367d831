"""raytf.testing against real Ray: nodes come and go, Ray notices, and nothing is left behind."""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
import pytest

from raytf.testing import ElasticCluster, Job, environment
from raytf.testing.processes import wait_until

#: An actor with the title of Ray Train's, on each node.
ACTORS = """
import os, ray, time
ray.init(log_to_driver=False, logging_level="error")

@ray.remote(num_cpus=1)
class RayTrainWorker:
    def node(self):
        return ray.get_runtime_context().get_node_id()

actors = [RayTrainWorker.remote() for _ in range(2)]
print(*ray.get([actor.node.remote() for actor in actors]), flush=True)
time.sleep(600)
"""
#: Ids of the nodes with notice.
DRAINING = """
import ray
ray.init(log_to_driver=False, logging_level="error")
print(*ray._private.state.state.get_draining_nodes())
"""


@pytest.mark.slow  # a dozen tests here have nodes come and go
def test_nodes_come_and_go_and_leave_nothing_behind(tmp_path: Path):
    with ElasticCluster() as cluster:
        head = cluster.head.processes()
        first, second = cluster.add_node(), cluster.add_node()
        cluster.wait(2)
        assert len({cluster.head.id, first.id, second.id}) == 3
        assert [node.id for node in cluster.nodes] == [first.id, second.id]

        job = Job([sys.executable, "-c", ACTORS], tmp_path / "log", environment(**cluster.env))
        job.until(lambda: {first.id, second.id} <= set(job.output.split()))
        assert [len(first.workers()), len(second.workers()), len(cluster.workers())] == [1, 1, 2]

        first.workers()[0].suspend()  # what a raylet cannot end any more is ended all the same
        killed = first.processes()
        first.kill()
        assert not first.is_alive
        assert not [p for p in killed if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        cluster.wait(1)
        assert cluster.nodes == [second]

        second.drain(60)
        asked = Job([sys.executable, "-c", DRAINING], tmp_path / "draining", environment(**cluster.env)).wait()
        assert asked.split()[-1] == second.id
        assert second.is_alive
        assert len(second.workers()) == 1, "a notice kills nothing"
        with pytest.raises(RuntimeError, match="is not one of"):
            cluster.ray("drain-node", f"--address={cluster.address}", "--reason=MOOD")
        with pytest.raises(TimeoutError, match="Ray knows of 1"):
            cluster.wait(2, seconds=0.5)

        third = cluster.add_node(cpus=2)
        third.stop()
        assert not third.processes()
        second.kill_raylet()
        assert cluster.nodes == []
        cluster.wait(0)
        wait_until(lambda: not second.workers(), "workers miss their raylet", 60)
        everything = [*head, *cluster.head.processes(), *second.processes()]
    wait_until(lambda: not [p for p in everything if p.is_running() and p.status() != psutil.STATUS_ZOMBIE], "gone", 10)
    assert not cluster.folder.exists()
    job.close()


def test_a_cluster_that_cannot_start_says_why_and_leaves_nothing():
    cluster = ElasticCluster(head_cpus=-1)
    with pytest.raises(RuntimeError, match=r"did not start:(?s:.)*-1"), cluster:
        pass
    assert not cluster.folder.exists()
