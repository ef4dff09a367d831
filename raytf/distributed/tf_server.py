"""A TensorFlow server in this process: a parameter server or one of its workers. Keras is not needed for that."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def start_server(cluster: dict[str, list[str]], job: str, index: int, threads: int) -> Any:
    """Run a TensorFlow server in this process, as long as it lives.

    Args:
        cluster: HOST:PORT of each of `chief`, `ps` and `worker`.
        job, index: the place of this one in it.
        threads: within an operation.
    """
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=threads, inter_op_parallelism_threads=max(4, threads)
    )
    config.gpu_options.allow_growth = True
    return tf.distribute.Server(
        tf.train.ClusterSpec(cluster), job_name=job, task_index=index, protocol="grpc", config=config, start=True
    )
