"""What goes with a strategy, what it asks of the cluster, and how many workers it has."""

from __future__ import annotations

import pytest

from raytf.config import resources
from raytf.config.flags import ONE_WORKER, ClusterSection, StrategySection
from raytf.config.train_config import TrainConfig, as_keyword_arguments, worker_range
from raytf.errors import ConfigError

#: settings -> words of the message.
REFUSED = [
    ({"strategy": "horovod"}, ["strategy='horovod'", "one of", "mirrored"]),
    ({"communication": "mpi"}, ["communication='mpi'", "auto, ring, nccl, host"]),
    ({"strategy": "one-device", "workers": "4"}, ["--workers 4", "one-device", "one worker", "Leave out"]),
    ({"strategy": "mirrored", "workers": "1:2"}, ["--workers 1:2", "mirrored", "multi-worker-mirrored"]),
    ({"strategy": "tpu", "workers": "2"}, ["--workers 2", "tpu"]),
    ({"strategy": "mirrored", "workers": "two"}, ["--workers two:", "1:4"]),
    ({"logical_devices": 2}, ["--logical-devices 2", "multi-worker-mirrored", "--workers", "--strategy mirrored"]),
    ({"strategy": "one-device", "logical_devices": 2}, ["--logical-devices 2", "one-device"]),
    ({"strategy": "parameter-server", "logical_devices": 2}, ["--logical-devices 2", "parameter-server"]),
    ({"strategy": "mirrored", "logical_devices": 0}, ["logical_devices=0", "1 or more"]),
    ({"strategy": "mirrored", "logical_devices": 2, "use_gpu": True}, ["--logical-devices 2", "--use-gpu"]),
    (
        {"strategy": "mirrored", "logical_devices": 8, "logical_shards": 4},
        ["--logical-devices 8", "4 logical shards", "--logical-shards 8"],
    ),
    ({"strategy": "mirrored", "communication": "ring"}, ["--communication ring", "mirrored", "network"]),
    ({"communication": "nccl", "use_gpu": False}, ["--communication nccl", "GPU", "host"]),
    ({"strategy": "tpu", "use_gpu": True}, ["--use-gpu", "tpu"]),
    ({"strategy": "mirrored", "communication": "host"}, ["--communication host", "mirrored"]),
    (
        {"communication": "nccl", "gpus_per_worker": 0.5},
        ["--communication nccl", "--gpus-per-worker 0.5", "two workers on one GPU", "host's memory"],
    ),
    ({"gpus_per_worker": 0.5, "use_gpu": False}, ["--gpus-per-worker 0.5", "--no-use-gpu"]),
    ({"strategy": "tpu", "gpus_per_worker": 0.5}, ["--gpus-per-worker 0.5", "tpu"]),
    ({"strategy": "mirrored", "gpus_per_worker": 0.5}, ["--gpus-per-worker 0.5", "mirrored", "all GPUs"]),
    ({"gpus_per_worker": 0.0}, ["gpus_per_worker=0.0", "above 0", "more --workers"]),
    ({"gpus_per_worker": 2.0}, ["gpus_per_worker=2.0", "at most 1", "more --workers"]),
    ({"gpus_per_worker": float("nan")}, ["gpus_per_worker=nan"]),
    ({"strategy": "mirrored", "overlap": True}, ["--overlap", "--strategy mirrored", "Leave out"]),
    ({"strategy": "parameter-server", "overlap": True}, ["--overlap", "--strategy parameter-server", "Leave out"]),
    ({"compress_gradients": True, "reduction": "float"}, ["--compress-gradients", "--reduction float", "order"]),
    (
        {"compress_gradients": True, "logical_shards": 256, "global_batch_size": 256},
        ["--compress-gradients", "256 logical shards", "128"],
    ),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED, ids=lambda case: str(case) if isinstance(case, dict) else "")
def test_what_does_not_go_together_is_refused_in_one_line(settings, words):
    with pytest.raises(ConfigError) as refused:
        TrainConfig.of(**settings).check()
    text = str(refused.value)
    assert "\n" not in text
    for word in map(as_keyword_arguments, words):
        assert word in text


GOOD = [
    {"strategy": "mirrored"},
    {"strategy": "mirrored", "logical_devices": 2},
    {"strategy": "mirrored", "logical_devices": 3, "exact": True},
    {"strategy": "mirrored", "workers": "1"},
    {"strategy": "one-device", "exact": True, "compress_gradients": True},
    {"strategy": "one-device", "logical_shards": 1},
    {"strategy": "central-storage", "logical_devices": 2, "use_gpu": False},
    {"communication": "ring", "workers": "1:4"},
    {"communication": "nccl"},
    {"communication": "nccl", "use_gpu": True},
    {"communication": "host"},
    {"communication": "host", "use_gpu": True, "gpus_per_worker": 0.5},
    {"communication": "ring", "gpus_per_worker": 0.5},
    {"gpus_per_worker": 0.2, "mixed_gpus": True},
]


@pytest.mark.parametrize("settings", GOOD, ids=str)
def test_what_goes_together_is_not_refused(settings):
    TrainConfig.of(**settings).check()


@pytest.mark.parametrize(
    ("strategy", "workers", "expected"),
    [
        ("multi-worker-mirrored", None, (2, 2)),
        ("multi-worker-mirrored", "1:4", (1, 4)),
        ("parameter-server", None, (2, 2)),
        *((name, workers, (1, 1)) for name in ONE_WORKER for workers in (None, "1", "1:1")),
    ],
)
def test_workers(strategy, workers, expected):
    assert worker_range(StrategySection(strategy), ClusterSection(workers)) == expected
    assert TrainConfig.of(strategy=strategy, workers=workers).worker_range == expected


@pytest.mark.parametrize(("devices", "shards"), [(None, 4), (2, 4), (4, 4), (5, 8), (8, 8)])
def test_there_are_shards_for_all_logical_devices(devices, shards):
    assert TrainConfig.of(strategy="mirrored", logical_devices=devices).logical_shards == shards


#: Nodes with 2, 8 and no GPUs.
NODES = [{"CPU": 8.0, "GPU": 2.0}, {"CPU": 64.0, "GPU": 8.0}, {"CPU": 64.0}]
ASKED = [
    ("multi-worker-mirrored", {}, False, NODES, {"CPU": 1.0}),
    ("multi-worker-mirrored", {}, True, NODES, {"CPU": 1.0, "GPU": 1.0}),
    ("multi-worker-mirrored", {"gpus_per_worker": 0.25}, True, NODES, {"CPU": 1.0, "GPU": 0.25}),
    ("multi-worker-mirrored", {"gpus_per_worker": 0.25}, False, NODES, {"CPU": 1.0}),
    ("one-device", {"gpus_per_worker": 0.5}, True, NODES, {"CPU": 1.0, "GPU": 0.5}),
    ("one-device", {}, True, NODES, {"CPU": 1.0, "GPU": 1.0}),
    ("mirrored", {}, True, NODES, {"CPU": 1.0, "GPU": 8.0}),
    ("central-storage", {}, True, NODES, {"CPU": 1.0, "GPU": 8.0}),
    ("mirrored", {}, True, [], {"CPU": 1.0, "GPU": 1.0}),
    ("mirrored", {}, False, NODES, {"CPU": 1.0}),
    ("mirrored", {"logical_devices": 3}, False, NODES, {"CPU": 3.0}),
    ("central-storage", {"logical_devices": 2, "cpus_per_worker": 2.0}, False, [], {"CPU": 4.0}),
    ("tpu", {}, False, [{"CPU": 240.0, "TPU": 4.0}], {"CPU": 1.0, "TPU": 4.0}),
]


@pytest.mark.parametrize(("strategy", "settings", "use_gpu", "nodes", "expected"), ASKED)
def test_what_each_worker_asks_for(strategy, settings, use_gpu, nodes, expected):
    config = TrainConfig.of(strategy=strategy, **settings)
    assert resources.resources(config.strategy, config.cluster, use_gpu, nodes) == expected


@pytest.mark.parametrize(
    ("settings", "workers", "cpus"),
    [
        ({}, 3, 3),
        ({"cpus_per_worker": 0.5}, 3, 1.5),
        ({"strategy": "mirrored", "logical_devices": 4, "cpus_per_worker": 2.0}, 1, 8),
        ({"strategy": "parameter-server"}, 2, 4),
        ({"strategy": "parameter-server", "ps": 3, "cpus_per_worker": 2.0}, 2, 8),
        ({"strategy": "tpu"}, 1, 1),
    ],
)
def test_cpus_of_a_run(settings, workers, cpus):
    config = TrainConfig.of(**settings)
    assert resources.cpus(config.strategy, config.cluster, workers) == cpus
