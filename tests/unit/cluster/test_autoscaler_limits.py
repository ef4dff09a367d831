"""What an autoscaler may bring a cluster to, by its process and its YAML."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from raytf.cluster.autoscaler_limits import Growth, find, most
from raytf.testing.processes import free_port

ROOT = Path(__file__).parents[3]
MONITOR = ["python", "-u", "/site-packages/ray/autoscaler/v2/monitor.py", "--gcs-address=10.0.0.1:6379"]


def node(cpu: float, workers: int | None, **more: float) -> dict:
    kind = {"resources": {"CPU": cpu, **more}, "node_config": {}}
    return kind if workers is None else {**kind, "max_workers": workers}


@pytest.mark.parametrize(
    ("types", "limit", "expected"),
    [
        ({"h": node(2, 0), "w": node(4, 3, GPU=1)}, 8, {"CPU": 12, "GPU": 3}),
        # Of what the cluster may have at all, the largest count.
        ({"h": node(2, 0), "a": node(4, 8), "b": node(16, 2, GPU=4)}, 4, {"CPU": 40, "GPU": 8}),
        ({"h": node(2, 0), "w": node(4, None)}, 5, {"CPU": 20}),
        ({"h": node(2, None), "w": node(4, 0)}, 5, {"CPU": 0}),
        ({"h": {"node_config": {}}, "w": node(4, 2)}, 5, {"CPU": 8}),
        # One type for all, as hosts of one's own have.
        ({"h": node(2, 3)}, 3, {"CPU": 6}),
        ({"h": {"resources": {}, "max_workers": 3}}, 3, Growth.UNKNOWN),
    ],
)
def test_what_workers_may_have_together(types: dict, limit: int, expected: Growth | dict[str, float]):
    assert most({"head_node_type": "h", "max_workers": limit, "available_node_types": types}) == expected


def test_a_cluster_is_told_by_its_autoscaler(tmp_path: Path):
    config = tmp_path / "ray_bootstrap_config.yaml"
    types = {"h": node(2, 0), "w": node(4, 3)}
    config.write_text(yaml.safe_dump({"head_node_type": "h", "max_workers": 3, "available_node_types": types}))
    grows = [*MONITOR, f"--autoscaling-config={config}"]
    other = [*MONITOR[:-1], "--gcs-address=10.0.0.1:6380"]
    assert find(6379, [["init"], other, grows]) == {"CPU": 12}
    assert find(6379, [["init"], other, MONITOR]) is Growth.NO
    assert find(6379, [["init"], other]) is Growth.UNKNOWN
    config.write_text("[")
    assert find(6379, [grows]) is Growth.UNKNOWN
    config.write_text("a: 1")
    assert find(6379, [grows]) is Growth.UNKNOWN
    config.unlink()
    assert find(6379, [grows]) is Growth.UNKNOWN


def test_nothing_is_known_where_no_autoscaler_runs():
    assert find(free_port()) is Growth.UNKNOWN
