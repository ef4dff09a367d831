"""Deaths that no socket shows, and nodes that others do not reach: the others go on."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from benchmarks.step.namespaces import namespaces, reason_not_possible
from raytf.runs import ledger
from raytf.storage.storage import Storage
from raytf.testing import Job, environment
from tests.ray.conftest import PATIENCE, result_of
from tests.stress.cut import JOB, Cluster, lose_packets, within
from tests.stress.law.schedules import redone
from tests.stress.repair import workers_of

FORKING = Path(__file__).parent / "jobs" / "forking.py"
#: Seconds after a death in which the others train again, on a loaded machine.
SOON = 30.0


def test_a_dead_worker_whose_child_holds_its_sockets_is_not_waited_for(tmp_path: Path):
    (children := tmp_path / "children").mkdir()
    (pause := tmp_path / "pause").touch()
    status = tmp_path / "status.json"
    command = [sys.executable, FORKING, "--children", children, "--pause", pause, "--workers", "2:3", "--exact"]
    command += ["--storage", tmp_path, "--run", "a", "--status-file", status, "--epochs", 40]
    command += ["--global-batch-size", 128, "--logical-shards", 6]
    job = Job([*map(str, command)], tmp_path / "log", environment(), status_file=status)
    try:
        job.until(lambda: len(workers_of(job)) == 3 and (job.step or 0) > 5, PATIENCE)
        (children / "fork").touch()
        job.until(lambda: len(list(children.glob("*-*"))) == 3, PATIENCE)
        at = job.step or 0
        job.until(lambda: (job.step or 0) > at + 5, PATIENCE)
        victim = workers_of(job)[0]
        child = next(int(file.name.partition("-")[0]) for file in children.glob(f"*-{victim.pid}"))
        victim.kill()
        began = time.monotonic()
        job.until(lambda: "the others go on" in job.output, PATIENCE)
        os.kill(child, 0)  # it lives, and has the sockets of the dead one
        print(f"the others went on {time.monotonic() - began:.1f} s after the death")
        assert time.monotonic() - began < SOON
        pause.unlink()
        job.wait(PATIENCE * 2)
    finally:
        job.close()
        for file in children.glob("*-*"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.name.partition("-")[0]), signal.SIGKILL)
    assert redone(tmp_path / "a") == 0


@pytest.mark.skipif(bool(reason_not_possible()), reason=reason_not_possible())
def test_a_node_that_a_member_does_not_reach_is_left_out(tmp_path: Path):
    (pause := tmp_path / "pause").touch()
    status = tmp_path / "status.json"
    command = [sys.executable, str(JOB), "--data", "digits", "--epochs", "12", "--exact", "--model", "batchnorm"]
    command += ["--workers", "1:3", "--global-batch-size", "96", "--logical-shards", "12", "--pause", "0.1"]
    command += ["--pause-while", str(pause), "--storage", str(tmp_path), "--run", "a", "--status-file", str(status)]
    with namespaces(3) as (hosts, _):
        cluster = Cluster(hosts, tmp_path)
        env = {"RAY_ADDRESS": cluster.address, **cluster.env}
        try:
            cluster.start(2)
            with Job(within(hosts[0], command), tmp_path / "log", environment(**env), status_file=status) as job:
                job.until(lambda: (job.status or {}).get("workers") == 2 and (job.step or 0) > 10, PATIENCE)
                members = workers_of(job)
                # The node that comes reaches the driver and its worker, and is lost to the other worker.
                lose_packets(hosts[1], hosts[2])
                lose_packets(hosts[2], hosts[1])
                cluster.join(hosts[2])
                job.until(lambda: "cannot reach each other" in job.output, PATIENCE)
                at = job.step or 0
                job.until(lambda: (job.step or 0) > at + 20, PATIENCE)
                assert all(worker.is_running() for worker in members)
                pause.unlink()
                job.wait(PATIENCE * 2)
                said = re.findall(r".*cannot reach each other.*", job.output)
        finally:
            cluster.stop()
    assert len(said) == 1, said
    faults = [event for event in ledger.read(Storage(str(tmp_path / "a"))) if event["kind"] == "fault"]
    assert len(faults) == 1, faults
    assert faults[0]["nodes"], faults
    assert redone(tmp_path / "a") == 0
    assert {tuple(epoch["seen"]) for epoch in result_of(tmp_path / "a")["history"]} == {(0.0, 0.0)}
