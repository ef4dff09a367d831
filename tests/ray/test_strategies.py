"""One job under each way to distribute: the same losses, and a run goes on under another one."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

import raytf
from raytf.testing import ElasticCluster, Job, environment
from tests.ray.conftest import MNIST_JOB, result_of

RANKS = Path(__file__).parent / "jobs" / "ranks.py"
PATIENCE = 400.0
MWMS = ("--strategy", "multi-worker-mirrored", "--workers", "2")
MIRRORED = ("--strategy", "mirrored", "--logical-devices", "2")


def losses(folder: Path) -> list[float]:
    return raytf.read_steps(str(folder))["loss"].tolist()


@pytest.mark.slow  # tests/tf/test_strategies.py compares the bits of each
def test_a_run_goes_on_under_another_strategy_and_computes_the_same_bits(start_there, tmp_path: Path):
    flags = ("--data", "digits", "--storage", tmp_path, "--checkpoint-every-steps", 10, "--exact")
    watched = ("--show-cluster", "--log-device-placement")
    alone = start_there(MNIST_JOB, *flags, "--run", "alone", "--strategy", "one-device", "--steps", 24)
    alone.wait(PATIENCE)
    first = start_there(MNIST_JOB, *flags, *watched, "--run", "moved", *MIRRORED, "--steps", 12).wait(PATIENCE)
    second = start_there(MNIST_JOB, *flags, *watched, "--run", "moved", *MWMS, "--steps", 24).wait(PATIENCE)
    assert "restored step 12" in second
    assert losses(tmp_path / "moved") == losses(tmp_path / "alone")
    assert len(losses(tmp_path / "moved")) == 24
    results = [result_of(tmp_path / name) for name in ("alone", "moved")]
    assert results[0]["weights_sha256"] == results[1]["weights_sha256"]
    assert results[0]["metrics"] == results[1]["metrics"]

    # One process has no TF_CONFIG; each start of a group has its own.
    assert "1 worker, mirrored" in first
    assert "CPU:1" in first
    assert "TF_CONFIG is not set: there is one process" in first
    assert "2 workers, multi-worker-mirrored" in second
    cluster = json.loads(re.search(r"TF_CONFIG cluster: (.*)", second).group(1))
    assert len(set(cluster["worker"])) == 2
    assert "worker 0" in second
    assert "worker 1" in second

    # Each worker tells what its devices do, and keeps the list.
    for line in (r"worker 0, CPU:0: \d+ operations", r"worker 0, CPU:1: \d+ operations"):
        assert re.search(line, first), first
    assert re.search(r"worker 1, CPU:0: \d+ operations of the step \(", second), second
    lists = [Path(p) for p in re.findall(r"the full list is in (.*)", first + second)]
    assert len(lists) == 3
    for path in lists:
        assert re.search(r"^CPU:0 \S*(MatMul|Conv2D)\S* ", path.read_text(), re.MULTILINE)


@pytest.mark.timeout(1800)
@pytest.mark.slow  # the one above, and tests/tf/test_strategies.py, compare bits
def test_mnist_ends_alike_under_all_synchronous_strategies(start_there, mnist_dir, tmp_path: Path):
    ways = {
        "mwms": MWMS,
        "mirrored": MIRRORED,
        "one": ("--strategy", "one-device"),
        "central": ("--strategy", "central-storage", "--logical-devices", "2"),
    }
    for name, flags in ways.items():
        fixed = ("--data", mnist_dir, "--storage", tmp_path, "--run", name, "--steps", 200)
        start_there(MNIST_JOB, *fixed, *flags).wait(PATIENCE)
    reference = losses(tmp_path / "mwms")
    best = result_of(tmp_path / "mwms")["metrics"]["test_accuracy"]
    assert best > 0.9
    for name in ways:
        found = losses(tmp_path / name)
        accuracy = result_of(tmp_path / name)["metrics"]["test_accuracy"]
        difference = max(abs(a - b) for a, b in zip(found, reference, strict=True))
        print(f"{name}: losses differ by {difference:.2g}, accuracy {accuracy:.4f}")
        assert difference <= 1e-4
        assert abs(accuracy - best) <= 0.005


@pytest.mark.slow
@pytest.mark.parametrize("flags", [MIRRORED, MWMS], ids=["mirrored", "multi-worker-mirrored"])
def test_a_killed_worker_is_replaced_and_the_new_group_is_shown(start, flags, tmp_path: Path):
    status = tmp_path / "status.json"
    fixed = ("--data", "digits", "--storage", tmp_path, "--run", "a", "--steps", 600, "--status-file", status)
    job = start(MNIST_JOB, *fixed, *flags, "--show-cluster", "--checkpoint-every-steps", 20)
    job.until(lambda: status.exists() and json.loads(status.read_text())["step"] >= 40, PATIENCE)
    job.processes("RayTrainWorker")[0].kill()
    output = job.wait(PATIENCE)
    tables = re.findall(r"^\d+ workers?, \S+", output, re.MULTILINE)
    assert len(tables) == 2
    clusters = re.findall(r"^TF_CONFIG (.*)", output, re.MULTILINE)
    if flags is MWMS:
        assert len(set(clusters)) == 2, "the new group has other ports"
    else:
        assert set(clusters) == {"is not set: there is one process"}
    assert result_of(tmp_path / "a")["restarts"] == 1
    assert raytf.read_steps(str(tmp_path / "a"))["step"].tolist() == list(range(1, 601))


def test_workers_know_their_rank_and_only_rank_0_starts_writes_and_decides(tmp_path: Path):
    # Two nodes of one address: a local rank by address would be another one.
    with ElasticCluster(head_cpus=2, nodes=1) as cluster:
        flags = ["--workers", "3", "--epochs", "3", "--storage", tmp_path / "runs", "--run", "r"]
        flags += ["--notes", tmp_path, "--communication", "ring", "--compress-gradients", "--overlap"]
        flags += ["--no-warm-workers"]
        env = environment(**cluster.env)
        with Job([sys.executable, str(RANKS), *map(str, flags)], tmp_path / "log", env) as job:
            output = job.wait(PATIENCE)
    assert "in the driver: raytf.size() was called outside of a worker" in output
    told = [(tmp_path / f"model-{rank}").read_text() for rank in range(3)]
    nodes = [line.rpartition(" ")[2] for line in told]
    assert len(set(nodes)) == 2
    for rank, line in enumerate(told):
        local = nodes[:rank].count(nodes[rank])
        assert line.startswith(f"{rank} of 3, here {local} of {nodes.count(nodes[rank])} on ")
        assert (tmp_path / f"augment-{rank}").read_text() == line.rpartition(" on ")[0]
    calls = [line.split() for line in (tmp_path / "callbacks").read_text().splitlines()]
    assert [(rank, epoch) for rank, _, epoch, _ in calls] == [("0", "0"), ("0", "1"), ("0", "2")]
    assert len({pid for _, pid, _, _ in calls}) == 1
    # The loss that the callback saw is that of all shards.
    history = result_of(tmp_path / "runs" / "r")["history"]
    assert [float(loss) for *_, loss in calls] == pytest.approx([e["loss"] for e in history], abs=1e-6)


def test_what_the_cluster_does_not_have_is_refused_before_a_worker_starts(start_there, tmp_path: Path):
    refused = {
        ("--strategy", "tpu"): "error: --strategy tpu: no node of this cluster has a TPU",
        ("--communication", "nccl"): "error: --communication nccl: NCCL sums gradients between GPUs",
        ("--strategy", "mirrored", "--logical-devices", "64"): "error: --strategy mirrored is one worker with 64 CPU",
    }
    common = ("--data", "digits", "--storage", tmp_path, "--global-batch-size", "128", "--logical-shards", "64")
    runs = [start_there(MNIST_JOB, *common, "--run", f"r{i}", *flags) for i, flags in enumerate(refused)]
    for run, (flags, text) in zip(runs, refused.items(), strict=True):
        assert run.ended(PATIENCE) == 2, flags
        assert text in run.output
        assert "Traceback" not in run.output
        assert "starting" not in run.output
