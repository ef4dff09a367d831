"""The table of `--show-cluster`."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from raytf.distributed import worker_table


def worker(index: int, config: dict | None) -> dict:
    text = "" if config is None else json.dumps({"cluster": config, "task": {"type": "worker", "index": index}})
    about = {"local_rank": 0, "node": f"{index}abcdef0123", "address": f"10.0.0.{index}", "pid": 100 + index}
    return about | {"devices": ["GPU:0 A100", "GPU:1 A100"], "memory": "7.0 of 8.0 GiB free", "tf_config": text}


def test_each_worker_has_a_row_and_the_cluster_a_line():
    cluster = {"worker": ["10.0.0.0:1", "10.0.0.1:2"]}
    lines = worker_table.table("2 workers", [worker(0, cluster), worker(1, cluster)]).splitlines()
    assert lines[0] == "2 workers"
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "10.0.0." in line and "│" in line]
    assert rows[1] == ["1", "0", "1abcdef0", "10.0.0.1", "101", "GPU:0 A100", "7.0 of 8.0 GiB free", "worker 1"]
    assert [row[0] for row in rows] == ["0", "1"]
    assert any("GPU:1 A100" in line for line in lines)
    assert lines[-1] == f"TF_CONFIG cluster: {json.dumps(cluster)}"
    # The first one says who is in the cluster, for all.
    processes = [worker(0, cluster), worker_table.without_cluster(worker(1, cluster))]
    assert worker_table.table("2 workers", processes) == "\n".join(lines)


def test_one_process_has_no_tf_config():
    lines = worker_table.table("1 worker, mirrored", [worker(0, None)]).splitlines()
    assert lines[0] == "1 worker, mirrored"
    assert lines[-1] == "TF_CONFIG is not set: there is one process"
    assert worker_table.without_cluster(worker(0, None)) == worker(0, None)


def test_processes_beside_servers_are_named_by_task_and_have_no_rank():
    cluster = {"chief": ["h:1"], "ps": ["h:2"], "worker": ["h:3"]}
    processes = [worker(i, cluster) for i in range(3)]
    for process, job in zip(processes, cluster, strict=True):
        del process["local_rank"]
        process["tf_config"] = json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}})
    lines = worker_table.table("1 worker, 1 parameter server and the coordinator", processes).splitlines()
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "10.0.0." in line and "│" in line]
    assert [row[-1] for row in rows] == ["chief 0", "ps 0", "worker 0"]
    assert rows[1][:3] == ["1abcdef0", "10.0.0.1", "101"]
    assert "rank" not in "".join(lines)
    assert lines[-1] == f"TF_CONFIG cluster: {json.dumps(cluster)}"


class Thread:
    """One of several ranks that are threads."""

    def __init__(self, rank: int, parts: list, barrier: threading.Barrier):
        self.rank, self.world_size, self._parts, self._barrier = rank, len(parts), parts, barrier

    def sum(self, values: np.ndarray) -> np.ndarray:
        self._parts[self.rank] = values
        self._barrier.wait()
        total = sum(self._parts)
        self._barrier.wait()
        return total


def test_bytes_of_every_rank_reach_every_rank():
    data = [b"", b"a longer one \xff\x00", b"b"]
    parts, barrier = [None] * 3, threading.Barrier(3, timeout=60)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda r: worker_table.gather(Thread(r, parts, barrier), data[r]), range(3)))
    assert found == [data] * 3
