"""A TensorFlow server in this process: a parameter server or one of its workers. It does not need Keras."""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def start_server(cluster: dict[str, list[str]], job: str, index: int, threads: int) -> Any:
    """Run a TensorFlow server in this process for as long as the process lives.

    Args:
        cluster: HOST:PORT of each of `chief`, `ps` and `worker`.
        job: this process's kind, one of these three.
        index: of this process among those of its kind.
        threads: within an operation.
    """
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=threads, inter_op_parallelism_threads=max(4, threads)
    )
    config.gpu_options.allow_growth = True
    return tf.distribute.Server(
        tf.train.ClusterSpec(cluster), job_name=job, task_index=index, protocol="grpc", config=config, start=True
    )
