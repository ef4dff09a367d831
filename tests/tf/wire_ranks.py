"""Workers of MultiWorkerMirroredStrategy that train with some form of whole numbers, each a process of its own.

    python -m tests.tf.wire_ranks '[["auto", ["a", "a"], "device", null], ["ring", ["a", "b"], "host", 100]]'

For each group: how it communicates, the host of each worker, the form, and bytes in a bucket where gradients are added
in such while others are computed. One worker has no group. Tells, in a line of
JSON, of each worker [number of the group, rank, `weights_sha256` and losses, without compression and with it]. All of
them are forked from this process once it has imported TensorFlow, which takes longer than the training.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from raytf.checkpoint.variables import weights_sha256
from raytf.data.plan import StepPlan, assign
from raytf.data.sources import ArraySource
from raytf.distributed.allreduce.reduction import Overlap
from raytf.distributed.encoding.wire import DEVICE, HOST
from raytf.distributed.membership.rendezvous import Meeting
from raytf.distributed.multi_worker import MultiWorkerGroup
from tests.tf.ranks import Rank

SHARDS, BATCH, STEPS = 4, 24, 6
WORDS = {"host": HOST, "device": DEVICE}


def source() -> ArraySource:
    random = np.random.default_rng(0)
    return ArraySource(random.normal(size=(72, 7)).astype("float32"), random.integers(0, 3, 72))


def build() -> keras.Model:
    """With tensors of odd sizes, layers' updates and random numbers."""
    stack = [layers.Dense(9), layers.BatchNormalization(momentum=0.9), layers.Dropout(0.3), layers.Dense(3)]
    model = keras.Sequential([keras.Input((7,)), *stack])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-2), loss, metrics=["accuracy"])
    return model


def outcomes(own: range, all_reduce: Any, form: str, overlap: Overlap | None) -> list[str]:
    data, told = source(), []
    for compress in (False, True):
        plan = StepPlan(data.records, BATCH, SHARDS)
        options: dict[str, Any] = {"compress": compress, "words": WORDS[form], "overlap": overlap}
        rank = Rank(build, data, plan, own, all_reduce, **options)
        losses = rank.train(0, STEPS)
        told.append(f"{weights_sha256(rank.model)} {losses.astype('<f4').tobytes().hex()}")
    return told


def work(
    communication: Any, hosts: list[str], form: str, bucket: int | None, rank: int, addresses: list[str]
) -> list[str]:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    if len(hosts) == 1:
        return outcomes(range(SHARDS), None, form, None)
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}})
    group = MultiWorkerGroup(Meeting(rank, tuple(addresses), bytes(32)), communication, lambda: hosts[rank])
    overlap = Overlap(bucket, -(-SHARDS // len(hosts))) if bucket else None
    return outcomes(assign(SHARDS, len(hosts))[rank], group.all_reduce, form, overlap)


def main(groups: list[tuple[str, list[str], str, int | None]]) -> None:
    reading, writing = os.pipe()
    children = []
    for number, (communication, hosts, form, bucket) in enumerate(groups):
        sockets = [socket.create_server(("127.0.0.1", 0)) for _ in hosts]
        addresses = [f"127.0.0.1:{s.getsockname()[1]}" for s in sockets]
        for s in sockets:
            s.close()
        for rank in range(len(hosts)):
            child = os.fork()
            if not child:
                try:
                    told: Any = work(communication, hosts, form, bucket, rank, addresses)
                except BaseException:
                    told = traceback.format_exc()[-2000:]
                os.write(writing, json.dumps([number, rank, told]).encode() + b"\n")
                signal.pause()  # whoever left before the others are done would be a lost peer
            children.append(child)
    with os.fdopen(reading) as lines:
        told = [json.loads(lines.readline()) for _ in children]
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
