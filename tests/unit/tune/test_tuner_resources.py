"""What trials take of a cluster, as tables: how many at a time, and with how many workers."""

from __future__ import annotations

from typing import Any

import pytest

from raytf.config import resources
from raytf.config.train_config import TrainConfig
from raytf.errors import ConfigError
from raytf.tune.tuner import TrialResources, largest, share

PS = {"strategy": "parameter-server"}
SYNC = {**PS, "sync_replicas": True}
MIRRORED = {"strategy": "mirrored", "logical_devices": 4}
BY_DEFAULT = [
    ({"workers": "2"}, 8, None, TrialResources(4)),
    ({"workers": "2"}, 8, 3, TrialResources(3)),
    ({"workers": "2"}, 1, None, TrialResources(1)),
    ({"workers": "1:4"}, 8, None, TrialResources(2)),
    ({"workers": "1:4"}, 8, 4, TrialResources(4, ["--workers=1:2", "--logical-shards=4"])),
    ({"workers": "1:8"}, 8, 8, TrialResources(8, ["--workers=1:1", "--logical-shards=8"])),
    ({"workers": "2:4"}, 8, 8, TrialResources(8, ["--workers=2:2", "--logical-shards=4"])),  # four wait, whole
    ({"workers": "1"}, 100, None, TrialResources(20)),
    ({"workers": "1:4", "logical_shards": 16}, 4, 2, TrialResources(2, ["--workers=1:2", "--logical-shards=16"])),
    ({"workers": "1:4", "cpus_per_worker": 2.0}, 8, 2, TrialResources(2, ["--workers=1:2", "--logical-shards=4"])),
]
WITH_A_STRATEGY = [
    ({**PS, "workers": "2"}, 8, None, TrialResources(2)),  # of four CPUs each
    ({**PS, "workers": "2"}, 7, None, TrialResources(1)),
    ({**PS, "workers": "2"}, 3, None, TrialResources(1)),
    ({**PS, "workers": "1:4"}, 12, 4, TrialResources(4, ["--workers=1:1", "--logical-shards=1"])),
    ({**PS, "workers": "1:4"}, 16, 4, TrialResources(4, ["--workers=1:2", "--logical-shards=1"])),
    ({**PS, "workers": "1:4"}, 24, 4, TrialResources(4)),
    ({**PS, "workers": "1:4", "ps": 3}, 24, 4, TrialResources(4, ["--workers=1:2", "--logical-shards=1"])),
    ({**SYNC, "workers": "1:4"}, 12, 4, TrialResources(4, ["--workers=1:1", "--logical-shards=4"])),
    (
        {**SYNC, "workers": "1:4", "replicas_to_aggregate": 3},
        12,
        4,
        TrialResources(4, ["--workers=1:3", "--logical-shards=4"]),
    ),
    (MIRRORED, 8, None, TrialResources(2)),
    (MIRRORED, 8, 4, TrialResources(4)),
    ({"strategy": "one-device"}, 8, None, TrialResources(8)),
]


@pytest.mark.parametrize(("settings", "cpus", "parallel", "expected"), BY_DEFAULT + WITH_A_STRATEGY)
def test_how_trials_share_a_machine(
    settings: dict[str, Any], cpus: int, parallel: int | None, expected: TrialResources
):
    config = TrainConfig.of(**settings)
    each = resources.resources(config.strategy, config.cluster, False, [])
    found = share(config, [{"CPU": float(cpus)}], each, 20, parallel, ["learning_rate"])
    assert found == expected
    config.replace(**{f.split("=")[0][2:].replace("-", "_"): f.split("=")[1] for f in found.flags[:1]}).check()


def test_what_fits_is_counted_node_by_node():
    nodes = [{"CPU": 3.0}, {"CPU": 3.0}, {"CPU": 1.0}]
    assert share(TrainConfig.of(workers="1", cpus_per_worker=2.0), nodes, {"CPU": 2.0}, 20, None, []) == TrialResources(
        2
    )
    servers = TrainConfig.of(workers="1", cpus_per_worker=2.0, **PS)
    assert share(servers, nodes, {"CPU": 2.0}, 20, None, []) == TrialResources(1)
    assert share(
        TrainConfig.of(workers="1"), [{"CPU": 9.0, "GPU": 2.0}], {"CPU": 1.0, "GPU": 1.0}, 9, None, []
    ) == TrialResources(2)


@pytest.mark.parametrize("name", ["workers", "logical_shards", "strategy", "sync_replicas", "replicas_to_aggregate"])
def test_a_search_over_what_sizes_a_trial_keeps_what_it_asks_for(name: str):
    assert share(TrainConfig.of(workers="1:4"), [{"CPU": 4.0}], {"CPU": 1.0}, 20, 4, [name]) == TrialResources(4)


@pytest.mark.parametrize(
    ("values", "points", "expected"),
    [
        ({"workers": "1:3", "learning_rate": 0.1}, [{"learning_rate": 1.0}], 3),
        ({**PS, "workers": "2"}, [{}], 4),
        ({**PS, "workers": "2", "ps": 3}, [{}], 6),
        ({**MIRRORED, "workers": None, "cpus_per_worker": 2.0}, [{}], 8),
        ({"workers": "1"}, [{"workers": 4}, {"workers": 1}], 4),
        ({"workers": None}, [{"strategy": "one-device"}, {"strategy": "parameter-server"}], 4),
        ({"workers": "1"}, [{"workers": 0}, {"workers": 2}], 2),  # the first trial says why it fails
        ({"workers": "1", **PS}, [{"ps": "a"}, {"ps": 4}], 6),
        ({"workers": "1"}, [{"cpus_per_worker": "a"}, {"cpus_per_worker": 0}, {"cpus_per_worker": 2.5}], 2.5),
    ],
)
def test_a_ray_for_a_search_has_room_for_the_largest_trial(
    values: dict[str, Any], points: list[dict[str, Any]], expected: float
):
    config = largest(values, points)
    assert resources.cpus(config.strategy, config.cluster, config.worker_range[1]) == expected


@pytest.mark.parametrize(
    ("values", "points", "words"),
    [
        ({"workers": "0"}, [{}], "--workers 0"),
        ({"workers": "2", "strategy": "mirrored"}, [{}, {}], "--workers 2 with --strategy mirrored"),
        ({"workers": "1"}, [{"workers": 0}, {"workers": "x"}], "--workers x"),
        ({"cpus_per_worker": 0.0}, [{}], "--cpus-per-worker 0.0"),
    ],
)
def test_a_search_none_of_whose_trials_can_have_workers_is_refused(
    values: dict[str, Any], points: list[dict[str, Any]], words: str
):
    with pytest.raises(ConfigError, match=words):
        largest(values, points)
