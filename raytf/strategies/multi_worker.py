"""MultiWorkerMirroredStrategy as raytf uses it: the strategy owns the cluster and the collectives, nothing else.

A worker has one device, so its shards are computed one after another. Model and optimizer variables are plain
`tf.Variable`s, created outside the strategy's scope, and only the reduction runs through `strategy.run`. Every rank
applies the same reduced gradient to the same values, so the copies stay equal without a mirrored container. What that
buys: Keras sees no strategy, so compiled losses keep their scale, metrics and callbacks read local numbers without a
collective, optimizers (clipping, EMA, loss scaling) run the code they run on one machine, and BatchNorm statistics are
reduced with the gradients instead of diverging.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.compiler.xla.tsl.protobuf import coordination_config_pb2
from tensorflow.python.eager import context

from raytf.devices import Devices, OneDevice
from raytf.sections import Communication

#: Milliseconds without a sign of life after which TensorFlow takes a worker for dead; they give two in that time. Its
#: default is 10 s. What beats needs no interpreter lock and next to no CPU, so that a loaded machine is no reason.
_HEARTBEAT_TIMEOUT_MS = 6000


class Group:
    """This worker's place among the workers, and their sum.

    Reads TF_CONFIG, which Ray Train's backend has set; create it before any TensorFlow operation.

    Args:
        communication: how collectives are made.

    Attributes:
        rank, world_size: int.
    """

    def __init__(self, communication: Communication = "auto") -> None:
        self.devices: Devices = OneDevice()
        resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
        self.rank = int(resolver.task_id or 0)
        self.world_size = max(1, len(resolver.cluster_spec().as_dict().get("worker", [])))
        if self.world_size > 1:
            # The strategy would configure the same service with TensorFlow's time.
            context.context().configure_coordination_service(
                service_type="standalone",
                service_leader="/job:worker/replica:0/task:0",
                heartbeat_timeout_in_ms=_HEARTBEAT_TIMEOUT_MS,
                coordinated_jobs=[coordination_config_pb2.CoordinatedJob(name="worker", num_tasks=self.world_size)],
            )
        experimental = tf.distribute.experimental
        options = experimental.CommunicationOptions(
            implementation=experimental.CommunicationImplementation(communication.upper())
        )
        self.strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
        self._sum_vector = tf.function(self.all_reduce, reduce_retracing=True, autograph=False)

    def all_reduce(self, tensor: tf.Tensor) -> tf.Tensor:
        """Sum of a tensor over all workers; call it at the same place on every one. May be traced."""
        if self.world_size == 1:
            return tf.identity(tensor)
        return self.strategy.run(_replica_sum, args=(tensor,))

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Sum of an array over all workers, now."""
        return values if self.world_size == 1 else self._sum_vector(tf.convert_to_tensor(values)).numpy()

    def share(self, data: bytes) -> bytes:
        """Rank 0's bytes, of any length, on every worker."""
        if self.world_size == 1:
            return data
        length = int(self.sum(np.array([len(data) if self.rank == 0 else 0], np.float64))[0])
        own = data if self.rank == 0 else bytes(length)
        return self.broadcast([np.frombuffer(own, np.uint8)])[0].tobytes()

    def broadcast(self, arrays: list[np.ndarray]) -> list[np.ndarray]:
        """Rank 0's arrays, bit for bit, on every worker; shapes and dtypes must agree everywhere."""
        if self.world_size == 1:
            return arrays
        raw = b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)
        words = np.frombuffer(raw + b"\0" * (-len(raw) % 4), np.int32)
        # Adding zeros in integers keeps every bit, NaN payloads included.
        reduced = self.sum(words if self.rank == 0 else np.zeros_like(words)).tobytes()
        out, begin = [], 0
        for a in arrays:
            out.append(np.frombuffer(reduced[begin : begin + a.nbytes], a.dtype).reshape(a.shape))
            begin += a.nbytes
        return out


def _replica_sum(tensor: tf.Tensor) -> Any:
    # The copy is made on the replica's device; the collective asks a tensor for its device, and a traced one has none.
    mine = tf.identity(tensor)
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, mine)
