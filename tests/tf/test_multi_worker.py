"""Sums over real workers of MultiWorkerMirroredStrategy, on one host and on several, and the path that they take.

There is no GPU here: which path GPUs would take is decided in tests/unit/distributed/allreduce/test_routes.py; here
processes take the paths that CPUs have, which are those of shared GPUs too. A GPU that was promised is really missing.
"""

import hashlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import keras
import numpy as np
import pytest

from raytf.checkpoint.variables import weights_sha256
from raytf.data.plan import StepPlan, assign
from raytf.data.sources import ArraySource
from raytf.distributed.allreduce.control_plane import broadcast
from raytf.distributed.multi_worker import within
from raytf.errors import GpuError
from tests.tf.ranks import Rank, train

pytestmark = pytest.mark.gate  # minutes, which .ci/run has

PATIENCE_SECONDS = 300
BATCH, SHARDS, STEPS = 32, 4, 5

#: A worker: what it adds in a graph, at once and hands round, and how the workers are spread.
WORKER = """
import json, os, sys
import numpy as np
addresses, rank, communication, hosts, gpus, promised, trains = json.loads(sys.argv[1])
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})
import tensorflow as tf
from raytf.errors import RaytfError
from raytf.distributed.membership.rendezvous import Meeting
from raytf.distributed.multi_worker import MultiWorkerGroup

def ready(**answer):
    print(json.dumps(answer), flush=True)
    sys.stdin.readline()
    os._exit(0)

try:
    own_gpu = lambda: gpus and (gpus[rank], "NVIDIA L4")
    meeting = Meeting(rank, tuple(addresses), bytes(32))
    group = MultiWorkerGroup(meeting, communication, lambda: hosts[rank], promised, own_gpu)
except RaytfError as error:
    ready(error=f"{type(error).__name__}: {error}")
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
answer = {
    "graph": bool((found == expected).all()),
    "sum": group.sum(np.array([[rank, 1.5]], np.float32)).tolist(),
    "share": group.share(b"from rank 0" if rank == 0 else b"").decode(),
    "on_host": 0 if group.on_host is None else group.on_host.count,
    "route": str(group.route) if group.route.why else "",
}
if trains:
    from tests.tf import test_multi_worker as test
    answer |= test.about_state(group) | test.about_placement(group) | test.trained(group)
ready(**answer)
"""


def model() -> keras.Model:
    made = keras.Sequential([keras.Input((12,)), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(4)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    made.compile(keras.optimizers.Adam(1e-2), loss)
    return made


def source() -> ArraySource:
    rng = np.random.default_rng(0)
    return ArraySource(rng.normal(size=(130, 12)).astype("float32"), rng.integers(0, 4, 130))


def trained(group) -> dict[str, object]:
    own = assign(SHARDS, group.world_size)[group.rank]
    rank = Rank(model, source(), StepPlan(130, BATCH, SHARDS), own, group.all_reduce)
    rank.train(0, STEPS)
    return {"weights": weights_sha256(rank.model)}


def state(rank: int) -> list[np.ndarray]:
    """A state of 1.2 MB, with what is zero, what is empty and odd lengths; other ranks' differs."""
    rng = np.random.default_rng(rank)
    made = [rng.normal(size=(300, 1001)).astype("float32"), np.zeros((300, 1001), "float32"), np.float64(rank - 0.5)]
    return [*made, np.zeros((0, 3), "int32"), np.full(7, -0.0, "float32"), np.arange(11, dtype="int8") + rank]


def digest(arrays: list[np.ndarray]) -> str:
    return hashlib.sha256(b"".join(f"{a.dtype} {a.shape}".encode() + a.tobytes() for a in arrays)).hexdigest()


def about_state(group) -> dict[str, object]:
    """What arrives of rank 0's state, in pieces of 64 KiB."""
    return {"state": digest(broadcast(state(group.rank), group.rank == 0, group.sum, 1 << 16))}


def about_placement(group) -> dict[str, object]:
    """Operations of a traced sum that do not name this rank's CPU, and that numbers without a sign are added."""
    import tensorflow as tf

    def add(first, second):
        return group.all_reduce([first, second])

    traced = tf.function(add, autograph=False)
    parts = tf.ones([5], tf.uint32), tf.fill([2], tf.constant(2**32 - 1, tf.uint32))
    found = [part.numpy().tolist() for part in traced(*parts)]
    cpu = "/device:CPU:0"
    graph = traced.get_concrete_function(*parts).graph
    # Results and arguments are where the caller has them.
    own = {"Placeholder", "NoOp"}
    elsewhere = [f"{op.name} on {op.device}" for op in graph.get_operations() if op.type not in own | {"Identity"}]
    return {"elsewhere": [each for each in elsewhere if not each.endswith(cpu)], "unsigned": found}


@contextmanager
def workers(communication: str, hosts: list, gpus: list | None = None, promised: list | None = None, trains=False):
    """Answers of worker processes, which live until the end of the `with` statement."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in hosts]
    addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
    for s in sockets:
        s.close()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    given = promised or [0.0] * len(hosts)
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, json.dumps([addresses, i, communication, hosts, gpus, given[i], trains])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        for i in range(len(hosts))
    ]
    try:
        yield answers(processes)
    finally:
        for process in processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()


def answers(processes: list[subprocess.Popen]) -> Iterator[dict]:
    return (json.loads(process.stdout.readline()) for process in processes)


def sums(count: int) -> dict[str, object]:
    return {"graph": True, "sum": [[count * (count - 1) / 2, 1.5 * count]], "share": "from rank 0"}


@pytest.mark.parametrize(
    ("communication", "hosts", "on_host", "route"),
    [
        ("auto", ["a", "b", "a"], [2, 0, 2], ""),
        ("auto", ["a", "a"], [2, 2], ""),
        ("ring", ["a", "a"], [0, 0], "gradients go over TensorFlow's gRPC ring: --communication ring"),
    ],
    ids=["two hosts", "one host", "over the network"],
)
def test_the_sum_is_that_of_all_workers(communication, hosts, on_host, route):
    with workers(communication, hosts) as answers:
        for members, answer in zip(on_host, answers, strict=True):
            assert answer == sums(len(hosts)) | {"on_host": members, "route": route}


@pytest.mark.parametrize(
    ("communication", "hosts", "gpus", "on_host", "why"),
    [
        ("host", ["a", "a"], None, [2, 2], "--communication host"),
        ("host", ["a", None], None, [0, 0], "--communication host"),
        ("auto", ["a", "b", "a"], ["x", "y", "x"], [2, 0, 2], "2 workers share one GPU of "),
    ],
    ids=["one host", "hosts of one worker", "two that share a GPU, and one of another host"],
)
def test_over_hosts_ranks_learn_the_same_and_nothing_is_put_elsewhere(communication, hosts, gpus, on_host, why):
    count = len(hosts)
    wrapped = [[count] * 5, [2**32 - count] * 2]
    with workers(communication, hosts, gpus, trains=True) as answers:
        expected = weights_sha256(train(model, source(), BATCH, SHARDS, STEPS, count)[0][0])
        for members, answer in zip(on_host, answers, strict=True):
            assert answer.pop("route").startswith(f"gradients go over the hosts' memory: {why}")
            assert answer.pop("elsewhere") == []
            assert answer == sums(count) | {
                "on_host": members,
                "state": digest(state(0)),
                "unsigned": wrapped,
                "weights": expected,
            }


def test_a_gpu_that_was_promised_and_is_not_there_is_the_fault_of_its_rank():
    with workers("auto", ["a", "a"], promised=[0.0, 0.5]) as answers:
        first, second = [answer["error"] for answer in answers]
    text = f"rank 1 on {os.uname().nodename} was given 0.5 GPU, but TensorFlow finds none there"
    assert first.startswith(f"WorkerLostError: {text}")
    assert second.startswith(f"GpuError: {text}")


def test_nccl_that_does_not_connect_is_a_fault_that_says_so():
    end = threading.Event()
    with pytest.raises(GpuError, match=r"NCCL has not connected the workers' GPUs in 0.01 s. .*--communication h"):
        within(0.01, lambda: end.wait(PATIENCE_SECONDS))
    end.set()
    with pytest.raises(ValueError, match="of NCCL's own"):
        within(PATIENCE_SECONDS, lambda: int("of NCCL's own"))
    within(PATIENCE_SECONDS, lambda: None)
