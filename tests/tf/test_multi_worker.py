"""Sums over real workers of MultiWorkerMirroredStrategy, on one host and on several."""

import json
import os
import socket
import subprocess
import sys

import pytest

PATIENCE_SECONDS = 300

#: A worker: what it adds in a graph, at once and hands round, and how the workers are spread.
WORKER = """
import json, os, sys
import numpy as np
addresses, rank, communication, hosts = json.loads(sys.argv[1])
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})
import tensorflow as tf
from raytf.strategies.multi_worker import Group
group = Group(communication, lambda: hosts[rank])
words = 100_001

@tf.function(autograph=False)
def several(start):
    def body(i, total):
        return i + 1, group.all_reduce([total + rank])[0]
    return tf.while_loop(lambda i, _: i < 3, body, (0, start), parallel_iterations=1)[1]

found = several(tf.range(words)).numpy()
count = len(addresses)
expected = np.arange(words)
for _ in range(3):
    expected = count * expected + count * (count - 1) // 2
print(json.dumps({
    "graph": bool((found == expected).all()),
    "sum": group.sum(np.array([[rank, 1.5]], np.float32)).tolist(),
    "share": group.share(b"from rank 0" if rank == 0 else b"").decode(),
    "on_host": 0 if group.on_host is None else group.on_host.count,
}), flush=True)
sys.stdin.readline()
os._exit(0)
"""


@pytest.mark.parametrize(
    ("communication", "hosts", "on_host"),
    [
        ("auto", ["a", "b", "a"], [2, 0, 2]),
        ("auto", ["a", "a"], [2, 2]),
        ("ring", ["a", "a"], [0, 0]),
    ],
    ids=["two hosts", "one host", "over the network"],
)
def test_the_sum_is_that_of_all_workers(communication, hosts, on_host):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in hosts]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps([addresses, rank, communication, hosts])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for rank in range(len(hosts))
    ]
    try:
        count = len(hosts)
        for worker, members in zip(workers, on_host, strict=True):
            answer = json.loads(worker.stdout.readline())
            assert answer == {
                "graph": True,
                "sum": [[count * (count - 1) / 2, 1.5 * count]],
                "share": "from rank 0",
                "on_host": members,
            }
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
            worker.stdin.close()
            worker.stdout.close()
