"""What the driver refuses before any worker starts, as far as that needs no Ray."""

from __future__ import annotations

import pytest

from raytf.checks import cpus_here
from raytf.config import TrainConfig
from raytf.errors import ClusterError


@pytest.mark.parametrize(
    ("settings", "cpus"),
    [
        ({"workers": "1"}, 1),
        ({"workers": "1", "strategy": "parameter-server"}, 3),
        ({"strategy": "mirrored", "logical_devices": 4}, 4),
    ],
)
def test_a_ray_of_this_machine_has_room_for_the_run(settings, cpus):
    assert cpus_here(TrainConfig.of(**settings)) == cpus


@pytest.mark.parametrize("strategy", ["multi-worker-mirrored", "parameter-server"])
def test_a_ray_of_this_machine_has_no_room_for_more_workers_than_its_memory(strategy):
    assert cpus_here(TrainConfig.of(workers="1:1000000", strategy=strategy)) < 1000000
    with pytest.raises(ClusterError, match=r"--workers 1000000: this machine's .* Use --workers \d+ or fewer"):
        cpus_here(TrainConfig.of(workers="1000000", strategy=strategy))
