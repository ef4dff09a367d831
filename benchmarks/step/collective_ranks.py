"""The processes of `collective.py`: those of TensorFlow, which add in several ways, and those of torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import tyro

from benchmarks import turns
from benchmarks.peers import common, mwms_tutorial

#: Parts of a vector that is added as several.
BUCKETS = 4
#: Multiples of this travel as 16 bits.
QUANTUM = 2.0**-10
#: Of the first process, in a network of its own: of TensorFlow's server, and of raytf's.
_PORT, _OWN_PORT = 20_000, 21_000
#: Environment variable with the addresses at which raytf's sockets listen.
_OWN = "BENCHMARK_ADDRESSES"


def ways(group: Any, own: Any, count: int) -> dict[str, Callable[[Any], Any]]:
    """Name -> a sum of a float32 vector over all processes, to be traced.

    Args:
        group: in TensorFlow's cluster.
        own: raytf's sockets and shared memory.
        count: of numbers in the vector.
    """
    import tensorflow as tf

    from raytf.distributed.encoding import wire

    experimental = tf.distribute.experimental

    def plain(tensor: Any, implementation: str = "AUTO") -> Any:
        options = experimental.CommunicationOptions(
            implementation=experimental.CommunicationImplementation(implementation)
        )

        def add(mine: Any) -> Any:
            context = tf.distribute.get_replica_context()
            return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.identity(mine), options)

        return group.strategy.run(add, args=(tensor,))

    def in_buckets(tensor: Any) -> Any:
        sizes = [count // BUCKETS] * (BUCKETS - 1)
        return tf.concat([plain(part) for part in tf.split(tensor, [*sizes, count - sum(sizes)])], 0)

    def in_16_bits(tensor: Any) -> Any:
        words = wire.join(tf.cast(tf.round(tensor / QUANTUM), tf.int32))
        return tf.cast(wire.part(plain(words), count), tf.float32) * QUANTUM

    return {
        "gRPC": plain,
        "gRPC ring": lambda tensor: plain(tensor, "RING"),
        f"gRPC, {BUCKETS} buckets": in_buckets,
        "gRPC, bfloat16": lambda tensor: tf.cast(plain(tf.cast(tensor, tf.bfloat16)), tf.float32),
        "gRPC, int16": in_16_bits,
        "raytf": lambda vector: own.add([vector])[0],
    }


def own_plane(rank: int) -> Any:
    """Return the control plane of a group without TensorFlow's cluster."""
    from raytf.distributed.allreduce.control_plane import SocketPlane
    from raytf.distributed.allreduce.host import host_identity
    from raytf.distributed.membership.rendezvous import Meeting

    addresses = tuple(json.loads(os.environ[_OWN]))
    plane = SocketPlane(Meeting(rank, addresses, bytes(32)))
    hosts = [row.decode() for row in plane.gather((host_identity() or addresses[rank]).encode())]
    plane.meet(hosts, addresses)
    return plane


def tensorflow_rank(program: common.Program) -> None:
    from raytf.distributed.membership.rendezvous import Meeting
    from raytf.training.process.process import ProcessSettings
    from raytf.training.worker import set_up

    task = json.loads(os.environ["TF_CONFIG"])
    rank = task["task"]["index"]
    place = Meeting(rank, tuple(task["cluster"]["worker"]), bytes(32))
    set_up(place, ProcessSettings(program.threads))
    import tensorflow as tf

    from raytf.distributed.multi_worker import MultiWorkerGroup

    group, own = MultiWorkerGroup(place, "ring"), own_plane(rank)
    known: dict[tuple[str, int], Any] = {}

    def function(way: str, count: int) -> Any:
        add = ways(group, own, count)[way]

        # Each sum is of the one before, so that none can be left out; divided, so that it stays what it was.
        def body(i: Any, x: Any) -> Any:
            return i + 1, tf.ensure_shape(add(x), [count]) / group.world_size

        def run(steps: Any) -> Any:
            start = tf.constant(0), tf.fill([count], 0.25)
            return tf.while_loop(lambda i, _: i < steps, body, start, parallel_iterations=1)[1][0]

        return tf.function(run, input_signature=[tf.TensorSpec([], tf.int32)], autograph=False)

    for steps, answer in turns.follow(program.address, rank):
        key = answer["way"], answer["count"]
        known[key] = known.get(key) or function(*key)
        found = float(known[key](tf.constant(steps)))
        assert abs(found - 0.25) < 0.01, (key, found)
    os._exit(0)


def torch_rank(program: common.Program) -> None:
    import torch
    from torch import distributed

    task = json.loads(os.environ["TF_CONFIG"])
    addresses, rank = task["cluster"]["worker"], task["task"]["index"]
    torch.set_num_threads(max(1, program.threads))
    distributed.init_process_group("gloo", init_method=f"tcp://{addresses[0]}", rank=rank, world_size=len(addresses))
    for steps, answer in turns.follow(program.address, rank):
        vector = torch.full([answer["count"]], 0.25)
        for _ in range(steps):
            distributed.all_reduce(vector)
            vector /= len(addresses)
        assert abs(float(vector[0]) - 0.25) < 0.01
    os._exit(0)


def main(program: common.Program) -> int:
    if "TF_CONFIG" in os.environ:
        (torch_rank if program.model == "torch" else tensorflow_rank)(program)
    command, places = [sys.executable, *sys.argv], [p.partition("@") for p in program.places.split(",") if p]
    prefixes = [["ip", "netns", "exec", name] for name, _, _ in places] or [[]] * program.workers
    addresses, own = (
        [f"{address}:{port + rank}" for rank, (_, _, address) in enumerate(places)]
        or mwms_tutorial.free_addresses(program.workers)
        for port in (_PORT, _OWN_PORT)
    )
    environments = mwms_tutorial.environments(program.workers, use_gpu=False, addresses=addresses)
    started = [
        subprocess.Popen([*prefix, *command], env=os.environ | more | {_OWN: json.dumps(own)})
        for prefix, more in zip(prefixes, environments, strict=True)
    ]
    return max(process.wait() for process in started)


if __name__ == "__main__":
    sys.exit(main(tyro.cli(common.Program)))
