"""Notices of preemption in real runs: saved, moved, no step done again, no failure counted."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

import pytest

from raytf.runs import ledger, timeline
from raytf.storage.storage import Storage
from raytf.testing import ElasticCluster, Job, MetadataServer, environment
from raytf.testing.cluster import Node
from tests.ray.conftest import manifests
from tests.ray.test_elastic import PATIENCE, trains
from tests.ray.test_resume import attempts
from tests.stress.law import schedules as law

RAYTF = [sys.executable, "-c", "from raytf.commands.main import main; main()"]

#: The policies with real workers and a real monitor: what they decide of a loss, and what the ledger hears.
LOSSES = """
    import json, os, ray, ray.train
    from ray.train import WorkerGroupError
    from raytf.errors import JobError, WorkerLostError
    from raytf.driver.monitor.actor import Monitor
    from raytf.driver.ray_train.run import FailurePolicy
    from raytf.driver.supervision.retry import Supervisor
    from raytf.training.process.monitor_client import MonitorClient

    @ray.remote(num_cpus=0)
    class Worker:
        def die(self):
            os._exit(1)

    def death():
        try:
            ray.get(Worker.remote().die.remote())
        except ray.exceptions.RayActorError as error:
            return error

    ray.init(logging_level="error", log_to_driver=False)
    dead, missed, wrong = death(), WorkerLostError("a peer"), JobError("division by zero")
    for noticed, failures in (
        ({}, {1: dead}),
        ({1: "n1"}, {1: dead}),
        ({1: "n1"}, {0: missed, 1: dead}),
        ({1: "n1"}, {0: missed}),
        ({1: "n1"}, {0: dead, 1: missed}),
        ({1: "n1"}, {0: wrong}),
    ):
        monitor = ray.remote(num_cpus=0)(Monitor).remote()
        monitor.set_noticed.remote(noticed)
        policy = FailurePolicy(ray.train.FailureConfig(max_failures=0), MonitorClient(monitor), None, Supervisor())
        decisions = [policy.make_decision(WorkerGroupError("lost", failures)).name for _ in range(3)]
        _, lines, events = ray.get(monitor.read.remote())
        print("LOSS", json.dumps([decisions, lines, events]))
"""


def test_a_loss_that_was_announced_is_not_counted_and_any_other_one_is(cluster: dict[str, str], tmp_path: Path):
    script = tmp_path / "losses.py"
    script.write_text(textwrap.dedent(LOSSES))
    there = environment(RAY_ADDRESS=cluster["RAY_ADDRESS"], RAY_AUTH_MODE="disabled")
    run = subprocess.run([sys.executable, str(script)], env=there, capture_output=True, text=True, timeout=PATIENCE)
    found = [json.loads(line.removeprefix("LOSS ")) for line in run.stdout.splitlines() if line.startswith("LOSS ")]
    retried = [set(decisions) == {"RETRY"} for decisions, _, _ in found]
    assert retried == [False, True, True, True, False, False], run.stderr
    for is_retried, (_, lines, events) in zip(retried, found, strict=True):
        preempted = [event for event in events if event["kind"] == "fault" and event["preemption"]]
        assert bool(preempted) is is_retried
        assert any("as announced" in line for line in lines) is is_retried
    assert found[0][1][0].endswith("; not tried again: --max-failures is used up")
    assert found[1][2][0] | {"time": 0} == {
        "time": 0,
        "kind": "fault",
        "cause": "node_lost",
        "ranks": [1],
        "nodes": ["n1"],
        "text": "node n1 is gone, as announced",
        "preemption": True,
        "silent": 0.0,
    }


@pytest.mark.slow  # test_aws.py has a notice and a replacement; tests/unit/cluster/preemption has each cloud's words
def test_each_cloud_s_notice_and_a_pod_s_end_cost_no_step_and_no_failure(tmp_path: Path):
    folder, status = tmp_path / "a", tmp_path / "status.json"
    command = [sys.executable, str(law.JOB), "--data", "digits", "--model", "batchnorm", "--global-batch-size", "64"]
    # It sleeps after each step until there is nothing more to come.
    (pause := tmp_path / "pause").touch()
    command += ["--pause", "0.1", "--pause-while", str(pause), "--epochs", "50"]
    command += ["--storage", str(tmp_path), "--run", "a"]
    command += ["--status-file", str(status), "--workers", "1:2", "--max-failures", "0", "--no-warm-workers"]
    # Nothing is saved and nothing changes but for a notice.
    command += ["--checkpoint-every-seconds", "3600", "--resize-every-seconds", "3600"]
    with MetadataServer() as metadata, ElasticCluster() as cluster:
        machines = {}
        for cloud in ("aws", "gcp", "azure"):
            node = cluster.add_node()
            machines[node] = metadata.add(cloud, node.id)
        command += ["--notice-url", f"{metadata.url}/{{node_id}}"]
        with Job(command, tmp_path / "log", environment(**cluster.env), status_file=status) as job:

            def moved(workers: int) -> bool:
                return len(attempts(folder)) == starts + 1 and trains(job, workers)

            def noted() -> list[int]:
                """The steps after which the law's callback was called, as they were made."""
                return [int(line.split()[1]) for line in (folder / "files" / "executed.txt").read_text().splitlines()]

            job.until(lambda: trains(job, 2), PATIENCE)

            # There is a spare node: one worker comes there and one leaves, at the end of one step.
            starts = 1
            first = next(node for node in machines if node.workers())
            machines[first].notice(60)
            told = time.monotonic()
            job.until(lambda: moved(2), PATIENCE)
            print(f"another worker trained {time.monotonic() - told:.1f} s after a cloud's notice")
            job.until(lambda: not first.workers(), PATIENCE)
            first.kill()

            # There is none: it goes on with fewer workers.
            starts = 2
            second = next(node for node in machines if node is not first and node.workers())
            machines[second].notice(60)
            job.until(lambda: moved(1), PATIENCE)
            job.until(lambda: not second.workers(), PATIENCE)
            second.kill()

            # The last node goes: it saves, trains on until the end, and waits for capacity.
            starts = 3
            (third,) = (node for node in machines if node not in (first, second))
            before = manifests(folder)[-1]
            machines[third].notice(60)
            told = time.monotonic()
            # A checkpoint may come beside it: of a group that starts again one is due.
            job.until(lambda: "saving, then training until it goes" in job.output, PATIENCE)
            job.until(lambda: manifests(folder)[-1] > before, PATIENCE)
            print(f"saved {time.monotonic() - told:.1f} s after a notice that could not be followed")
            saved = manifests(folder)[-1]
            job.until(lambda: trains(job, 1) and noted()[-1] >= saved + 5, PATIENCE)
            saved = manifests(folder)[-1]
            third.kill()
            before_loss = noted()
            assert before_loss == sorted(set(before_loss))
            job.until(lambda: "waiting: the cluster can run 0 workers" in job.output, PATIENCE)

            # A pod comes, in which `raytf node` is the first process; SIGTERM ends it once the run has left.
            pod = cluster.add_node(under=[*RAYTF, "node", "--notices", "off", "--grace-seconds", "90", "--"])
            job.until(lambda: moved(1), PATIENCE)
            assert saved <= attempts(folder)[3]["from_step"] < noted()[-1]
            starts = 4
            other = cluster.add_node()
            told = time.monotonic()
            pod.stop(90)
            print(f"a pod ended {time.monotonic() - told:.1f} s after SIGTERM")
            assert_left_in_time(pod)
            job.until(lambda: other.workers() and len(attempts(folder)) == 6 and trains(job, 1), PATIENCE)
            pause.unlink()
            output = job.wait(PATIENCE)
    after_loss = noted()[len(before_loss) :]
    assert after_loss == sorted(set(after_loss))
    # A worker that moves alone hands its state over in one step, and leaves in the next.
    sizes = [(a["world_size"], a["tier"]) for a in attempts(folder)]
    assert sizes == [(2, "new"), (2, "held"), (1, "held"), (1, "durable"), (2, "held"), (1, "held")]
    for words in ("AWS will terminate it", "Google Cloud preempts it", "Azure evicts it"):
        assert output.count(words) == 1, output
    assert output.count("notice for node ") == 3
    assert output.count("is gone, as announced; starting again") == 1
    assert "at least 1 are needed: saving, then training until it goes" in output
    assert "workers were lost" not in output
    book = ledger.read(Storage(str(folder)))
    kinds = Counter(event["kind"] for event in book)
    assert sorted(event["cloud"] for event in book if event["kind"] == "notice") == ["aws", "azure", "gcp"]
    assert {event["node"] for event in book if event["kind"] == "drain"} == {*(n.id for n in machines), pod.id}
    assert [event["to"] for event in book if event["kind"] == "resize"] == [2, 1, 1]
    assert kinds["park"] >= 1
    # The only loss is that of the last node, of which the run had notice.
    assert [event["preemption"] for event in book if event["kind"] == "fault"] == [True]
    seconds = timeline.account(timeline.timeline(book))
    assert "waiting" in seconds


def assert_left_in_time(pod: Node) -> None:
    assert "SIGTERM: asking Ray to drain node" in pod.output
    assert "no Ray Train worker left here; stopping the command" in pod.output
