"""The memory tier: a node dies while storage is away, and the run goes on from what the other node holds in memory."""

from __future__ import annotations

import csv
import functools
import json
import os
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

import raytf
from raytf.checkpoint.step_rows import StepRows
from raytf.testing import ElasticCluster, Job, StorageProxy, environment
from tests.ray.conftest import EVERYTHING, PATIENCE, Bucket

KEEPER = "Keeper"


def keepers(cluster: ElasticCluster) -> list:
    found = [p for node in [cluster.head, *cluster.nodes] for p in node.processes()]
    return [p for p in found if KEEPER in " ".join(p.cmdline())]


@pytest.mark.slow  # test_bad_input.py has storage that fails, test_aws.py a node that goes
def test_a_node_dies_while_storage_is_away(tmp_path: Path, bucket: Bucket, monkeypatch: pytest.MonkeyPatch):
    status = tmp_path / "status.json"
    # All nodes need credentials, not the job alone.
    (tmp_path / ".aws").mkdir()
    keys = "\n".join(f"{name.lower()} = {value}" for name, value in bucket.env.items())
    (tmp_path / ".aws" / "credentials").write_text(f"[default]\n{keys}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    with StorageProxy(bucket.endpoint) as proxy, ElasticCluster(nodes=3) as cluster:
        uri, bucket.endpoint = bucket.uri("runs/a"), proxy.endpoint
        flags = {
            "--global-batch-size": 16,
            "--epochs": 10,
            "--patience": 50,
            "--checkpoint-every-steps": 100,
            "--snapshot-every-steps": 5,
            "--steps-per-call": 5,
            "--storage": bucket.uri("runs"),
            "--run": "a",
            "--status-file": status,
        }
        command = [sys.executable, str(EVERYTHING), "--no-warm-workers"]
        command += [str(x) for flag in flags.items() for x in flag]
        env = environment(**cluster.env)
        with Job(command, tmp_path / "log", env, status_file=status) as job:
            # An epoch has 63 steps; its end writes files of callbacks, which storage will not have.
            job.until(lambda: (job.status or {}).get("checkpoint") and (job.status or {})["step"] >= 200)
            proxy.down()
            at = job.step
            job.until(lambda: job.step >= at + 70)
            job.until(lambda: (job.status or {})["trouble"])
            job.until(lambda: "was NOT saved; training continues" in job.output)
            working = [node for node in cluster.nodes if node.workers()]
            assert len(working) == 2
            assert len(keepers(cluster)) == 2
            before = job.status
            # The other worker, too: of two, one would go on without a step lost.
            others = working[1].workers()
            working[0].kill()
            for worker in others:
                worker.kill()
            job.until(lambda: "restored step" in job.output)
            job.until(lambda: job.step > before["step"] + 20)
            job.until(lambda: job.output.count("was NOT saved; training continues") == 2)
            proxy.up()
            output = job.wait()
        cluster_is_empty = time.monotonic() + PATIENCE
        while keepers(cluster) and time.monotonic() < cluster_is_empty:
            time.sleep(0.1)
        assert not keepers(cluster), "keepers outlive their run"
    assert "from memory of 1 node" in output
    assert "saving works again: step " in output
    attempts = [json.loads(bucket.get(k)) for k in sorted(bucket.keys("runs/a/attempts/"))]
    assert [a["from_step"] > 0 for a in attempts] == [False, True]
    # What was done again: at most the steps between two copies, and those of the call that was cut off.
    assert attempts[1]["from_step"] >= before["step"] - 10
    assert raytf.read_steps(uri)["step"].tolist() == list(range(1, 10 * 63 + 1))
    rows = list(csv.DictReader(bucket.get("runs/a/files/log.csv").decode().splitlines()))
    assert [row["epoch"] for row in rows] == [str(epoch) for epoch in range(10)]


@pytest.fixture
def driver(cluster: dict[str, str]):
    import ray

    with pytest.MonkeyPatch.context() as env:
        env.setenv("RAY_AUTH_MODE", "disabled")
        ray.init(address=cluster["RAY_ADDRESS"], log_to_driver=False, logging_level="ERROR")
        try:
            yield ray
        finally:
            ray.shutdown()


class Monitor:
    """In the place of a run's driver."""

    def is_there(self) -> bool:
        return True


def test_two_copies_of_one_step_count_and_leave_the_one_before(driver, tmp_path: Path):
    import keras
    import numpy as np

    from raytf.checkpoint import memory_keeper, slot_ledger, variables
    from raytf.checkpoint.manifest import CheckpointDocument
    from raytf.checkpoint.memory import MemorySave, MemoryTier
    from raytf.checkpoint.naming import GroupAttempt
    from tests.tf.ranks import Alone

    uri, attempt = str(tmp_path / "run"), "20260101T000000.000-aaaaaa"
    monitor = driver.remote(num_cpus=0)(Monitor).remote()
    variable = keras.Variable(np.zeros(1000, np.float32))
    snapshots = MemoryTier(uri, Alone(), GroupAttempt(attempt), 10, monitor, print, (0, 1))
    snapshots.reserve({"w": 1000}, functools.partial(variables.Variables, {"w": variable}))
    deadline = time.monotonic() + PATIENCE
    while snapshots.copied is None:
        assert time.monotonic() < deadline
        snapshots.begin(MemorySave(0, CheckpointDocument(), StepRows()))
    for step in (10, 20, 20, 20):
        variable.assign(np.full(1000, step, np.float32))
        snapshots.begin(MemorySave(step, CheckpointDocument(), StepRows()))
    snapshots.settle()
    assert snapshots.is_sealed
    there = slot_ledger.generations(memory_keeper.survey(uri, 30), {attempt})
    assert [g.step for g in there] == [20, 10]
    assert snapshots.load(there[0]).tensors["w"].tolist() == [20] * 1000
    assert snapshots.load(there[1]).tensors["w"].tolist() == [10] * 1000
    memory_keeper.dismiss(uri)


def owner(path: str) -> int:
    """The process that owns a slot."""
    return int(path.split("/")[2])


def until(condition, work=lambda: None) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline
        work()
        time.sleep(0.02)


def test_a_keeper_that_dies_or_freezes_is_noticed_and_replaced(driver, tmp_path: Path):
    import keras
    import numpy as np

    from raytf.checkpoint import keeper_client, memory_keeper, slot_ledger, variables
    from raytf.checkpoint.manifest import CheckpointDocument
    from raytf.checkpoint.memory import MemorySave, MemoryTier
    from raytf.checkpoint.naming import GroupAttempt
    from tests.tf.ranks import Alone

    uri, attempt, said = str(tmp_path / "run"), "20260101T000000.000-aaaaaa", []
    monitor = driver.remote(num_cpus=0)(Monitor).remote()
    variable = keras.Variable(np.zeros(1000, np.float32))
    snapshots = MemoryTier(uri, Alone(), GroupAttempt(attempt), 10, monitor, said.append, (0, 1))

    def copy(step: int) -> None:
        variable.assign(np.full(1000, step, np.float32))
        snapshots.begin(MemorySave(step, CheckpointDocument(), StepRows()))

    def held() -> list[slot_ledger.Generation]:
        return slot_ledger.generations(memory_keeper.survey(uri, 30), {attempt})

    snapshots.reserve({"w": 1000}, functools.partial(variables.Variables, {"w": variable}))
    until(lambda: snapshots.is_empty)
    assert snapshots.step is None
    copy(10)
    until(lambda: snapshots.step == 10, snapshots.poll)
    assert not snapshots.is_empty

    # The rank's own mapping stays valid: what it copies now, nobody could restore.
    (place,) = held()[0].holders.values()
    os.kill(owner(place[0].path), signal.SIGKILL)
    until(lambda: snapshots.step is None, lambda: copy(20))
    until(lambda: snapshots.is_empty)  # another one is there, and all ranks are asked to copy
    copy(30)
    until(lambda: snapshots.step == 30, snapshots.poll)
    assert [g.step for g in held()] == [30]
    assert snapshots.load(held()[0]).tensors["w"].tolist() == [30] * 1000
    assert len(said) == 1
    assert "memory died, and its copies are lost" in said[0]

    # One that answers nobody holds nothing for anybody, and stands in the way of another one.
    (place,) = held()[0].holders.values()
    frozen = psutil.Process(owner(place[0].path))
    frozen.suspend()
    began = time.monotonic()
    until(lambda: snapshots.step is None, snapshots.poll)
    assert time.monotonic() - began >= keeper_client.FRESH_SECONDS / 2
    until(lambda: snapshots.is_empty, snapshots.poll)
    assert not frozen.is_running()
    copy(40)
    until(lambda: snapshots.step == 40, snapshots.poll)
    assert [g.step for g in held()] == [40]
    memory_keeper.dismiss(uri)


def test_keepers_outlive_their_writers_but_not_their_run(driver, tmp_path: Path):
    import numpy as np

    from raytf.checkpoint import memory_keeper, slot_ledger, snapshot_slot
    from raytf.checkpoint.slot_ledger import SlotRequest

    ray, uri = driver, str(tmp_path / "run")

    monitor = ray.remote(num_cpus=0)(Monitor).remote()

    @ray.remote(num_cpus=0, max_retries=0)
    def write(attempt, steps, die):
        import os

        place = ray.get(memory_keeper.keeper(uri).reserve.remote(SlotRequest(attempt, 0, 1, 100), monitor))
        pair = [snapshot_slot.Slot(path) for path in place.paths]
        for step in steps:
            pair[0].write(
                slot_ledger.MemoryShare(step, attempt, 0, 1), {"w": np.full(1000, step, np.float32)}, {}, b"{}"
            )
            pair.reverse()
        if die:
            os.kill(os.getpid(), 9)
        ray.get(memory_keeper.keeper(uri).tidy.remote(attempt))

    with pytest.raises(ray.exceptions.WorkerCrashedError):
        ray.get(write.remote("a", [10, 20, 30], die=True))

    def there():
        return [(g.step, g.attempt) for g in slot_ledger.generations(memory_keeper.survey(uri, 30), None)]

    assert there() == [(30, "a"), (20, "a")]
    newest = slot_ledger.generations(memory_keeper.survey(uri, 30), None)[0]
    assert memory_keeper.load(uri, newest).tensors["w"].tolist() == [30] * 1000
    ray.get(write.remote("b", [40], die=False))
    assert there() == [(40, "b")]
    with pytest.raises(raytf.CheckpointError, match="step 30"):
        memory_keeper.load(uri, newest)
    memory_keeper.dismiss(uri)
    assert memory_keeper.survey(uri) == {}

    # A keeper whose driver has died ends by itself.
    keeper = ray.remote(num_cpus=0)(memory_keeper.Keeper).remote(alone_seconds=3.0)
    large = SlotRequest("c", 0, 1, 1 << 60)
    assert ray.get(keeper.reserve.remote(large, monitor)).reason.endswith("the node's free memory")
    ray.kill(monitor)

    def ask_until_it_ends():
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            ray.get(keeper.held.remote())
            time.sleep(0.2)

    with pytest.raises(ray.exceptions.RayActorError):
        ask_until_it_ends()
