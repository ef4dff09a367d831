"""A run on a cluster that Ray's autoscaler grows, without a cloud: its fake provider starts raylets on this machine.

The provider is Ray's own, and stands in for what takes a cloud's control plane: machines that come when they are asked
for. The autoscaler (v2), the nodes and the run are real.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from raytf.runs import ledger, timeline
from raytf.runs.run_log import read_attempts
from raytf.storage.storage import Storage
from raytf.testing import Job, environment
from raytf.testing.processes import free_port

ROOT = Path(__file__).parents[2]
JOB = Path(__file__).parent / "jobs" / "until_told.py"
RAY = [sys.executable, "-m", "ray.scripts.scripts"]
#: Ray's ids of the nodes of its fake provider: the head's, and those of workers by their number.
HEAD_ID = "f" * 51 + "00000"
#: Two cores, perhaps loaded.
PATIENCE = 300.0
#: Of a cluster's YAML; Ray fills them in for its own providers only.
_COMMANDS = (
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)
_NODES = """
import json, sys
from ray._raylet import GcsClient
client = GcsClient(address=sys.argv[1])
print(json.dumps({node.node_id.hex(): node.state for node in client.get_all_node_info().values()}))
"""


@dataclass(frozen=True)
class Head:
    """A head with an autoscaler.

    Attributes:
        env: with which a job finds it.
    """

    address: str
    env: dict[str, str]

    def alive(self) -> set[str]:
        """Ids of the worker nodes that live."""
        done = subprocess.run(
            [sys.executable, "-c", _NODES, self.address],
            env=environment(**self.env),
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, done.stderr
        return {node for node, state in json.loads(done.stdout).items() if state == 0} - {HEAD_ID}

    def drain(self, node: str, seconds: int) -> None:
        """Give a node notice of preemption."""
        command = [*RAY, "drain-node", f"--address={self.address}", f"--node-id={node}"]
        command += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=spot", "--deadline-remaining-seconds"]
        subprocess.run([*command, str(seconds)], env=environment(**self.env), check=True, timeout=PATIENCE)


@contextmanager
def autoscaling(folder: Path) -> Iterator[Head]:
    """A head without CPUs, whose autoscaler starts nodes of one CPU for what waits, four at most."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    memory = 150_000_000
    config = {
        "cluster_name": "fake",
        "max_workers": 4,
        "idle_timeout_minutes": 10,
        "provider": {
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "head_node_id": HEAD_ID,
            "gcs_address": address,
            "launch_multiple": True,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {
                "resources": {"CPU": 1, "object_store_memory": memory},
                "node_config": {},
                "min_workers": 0,
                "max_workers": 4,
            },
        },
        "head_node_type": "ray.head.default",
        "auth": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        **{key: [] for key in _COMMANDS},
    }
    (folder / "cluster.json").write_text(json.dumps(config))
    env = {
        "RAY_AUTH_MODE": "disabled",
        "RAY_FAKE_CLUSTER": "1",
        "RAY_enable_autoscaler_v2": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_CLOUD_INSTANCE_ID": HEAD_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": HEAD_ID,
    }
    # Ray's sockets have paths of at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="raytf-", dir="/tmp", ignore_cleanup_errors=True) as ray_folder:
        command = [*RAY, "start", "--head", "--block", f"--port={port}", "--num-cpus=0", f"--temp-dir={ray_folder}"]
        command += [f"--autoscaling-config={folder / 'cluster.json'}", f"--object-store-memory={memory}"]
        command += ["--include-dashboard=false", f"--ray-client-server-port={free_port()}"]
        command += [f"--dashboard-agent-listen-port={free_port()}", "--min-worker-port=0", "--max-worker-port=0"]
        with Job(command, folder / "head.log", environment(**env)) as head:
            head.until(lambda: "Ray runtime started" in head.output, PATIENCE)
            yield Head(address, {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"})


@pytest.mark.slow  # test_aws.py has Ray's autoscaler, a notice and a replacement, with instances of a cloud
def test_a_run_grows_with_the_cluster_and_is_whole_again_after_a_preemption(tmp_path: Path):
    folder, status, stop = tmp_path / "a", tmp_path / "status.json", tmp_path / "stop"
    command = [sys.executable, str(JOB), "--stop-file", str(stop), "--storage", str(tmp_path), "--run", "a"]
    command += ["--status-file", str(status), "--workers", "1:3", "--max-failures", "0", "--resize-every-seconds", "5"]

    with autoscaling(tmp_path) as head:
        env = environment(**head.env, PYTHONPATH=str(ROOT))
        with Job(command, tmp_path / "log", env, status_file=status) as job:
            began = time.monotonic()

            def trains(workers: int) -> bool:
                now = job.status or {}
                return now.get("workers") == workers and now["phase"] == "training" and now["samples_per_second"] > 0

            job.until(head.alive, PATIENCE)
            print(f"a node for a run that waits after {time.monotonic() - began:.1f} s")
            job.until(lambda: trains(3), PATIENCE)
            print(f"three workers train after {time.monotonic() - began:.1f} s")

            before = head.alive()
            told = time.monotonic()
            leaving = min(before)
            head.drain(leaving, 120)
            starts = len(read_attempts(Storage(str(folder))))
            job.until(lambda: head.alive() - before, PATIENCE)
            print(f"the replacement was there {time.monotonic() - told:.1f} s after the notice")
            job.until(lambda: len(read_attempts(Storage(str(folder)))) > starts and trains(3), PATIENCE)
            print(f"three workers train again {time.monotonic() - told:.1f} s after the notice")
            stop.touch()
            output = job.wait(PATIENCE)

    run = Storage(str(folder))
    assert "workers were lost" not in output
    sizes = [attempt["world_size"] for attempt in read_attempts(run)]
    assert sizes[-1] == 3, sizes
    book = ledger.read(run)
    assert [event for event in book if event["kind"] == "fault"] == []
    assert [event["node"] for event in book if event["kind"] == "drain"] == [leaving]
    assert any(event["preemption"] for event in book if event["kind"] == "resize")
    assert timeline.account(timeline.timeline(book)).get("redone", 0.0) == 0.0
    assert re.search(r"^finished: \d+ steps, ", output, re.MULTILINE)
