"""The processes of a group with parameter servers: the actors, and what they run."""

from __future__ import annotations

import os
import time
from typing import Any

import ray

from raytf._ray import train
from raytf.distributed import worker_table
from raytf.distributed.membership import rendezvous
from raytf.errors import GpuError, WorkerLostError
from raytf.runs.restart_phases import Phases
from raytf.training import worker
from raytf.training.job import TrainingJob
from raytf.training.process import process
from raytf.training.process.process import ProcessSettings


class GroupProcess:
    """An actor: one process of the group. It imports TensorFlow while the others start.

    Args:
        threads: TensorFlow's threads within an operation.
        quiet: silence TensorFlow's messages.
    """

    def __init__(self, threads: int, quiet: bool):
        self._phases = Phases()
        self._threads = threads
        os.environ["GRPC_FAIL_FAST"] = "use_caller"  # wait for a peer that is restarting
        #: Raised by the first call: if an actor's constructor raises, Ray passes on only the text.
        self._fault: GpuError | None = None
        try:
            process.load_tensorflow(ProcessSettings(quiet=quiet))
        except GpuError as error:
            self._fault = error
        self._phases.mark("tensorflow")
        self._server: Any = None

    def address(self) -> str:
        """Return HOST:PORT for this process's TensorFlow server.

        Raises:
            GpuError: this process does not have the GPU that it was given.
        """
        if self._fault is not None:
            raise self._fault
        return rendezvous.joined(*train.free_address())

    def join(self, cluster: dict[str, list[str]], job: str, index: int) -> dict[str, Any]:
        """Take a place in the cluster.

        Args:
            cluster: HOST:PORT of each of `chief`, `ps` and `worker`.
            job: this process's kind, one of these three.
            index: of this process among those of its kind.

        Returns:
            What `--show-cluster` shows about this process.
        """
        process.settle_in()
        process.take_place(cluster, job, index)
        return worker_table.about_me(serves=True)

    def serve(self, cluster: dict[str, list[str]], job: str, index: int) -> dict[str, Any]:
        """Join the cluster and start to serve.

        Raises:
            WorkerLostError: the address is on another node: Ray has not restarted this process on the same one.
            GpuError: this process does not have the GPU that it was given.
        """
        host = cluster[job][index].rpartition(":")[0].strip("[]")
        if ray.util.get_node_ip_address() != host:
            raise WorkerLostError(f"its node {host} is gone")
        if self._fault is not None:
            raise self._fault
        self._server = start_server(cluster, job, index, self._threads)
        return self.join(cluster, job, index)

    def live(self) -> None:
        """Wait forever: the call ends with the process."""
        while True:
            time.sleep(3600)

    def coordinate(self, job: TrainingJob, cluster: dict[str, list[str]]) -> dict[str, Any] | None:
        """Train, and return the run's result."""
        import tensorflow as tf

        from raytf.parameter_server.coordinator import ParameterServerExecutor

        tf.config.threading.set_intra_op_parallelism_threads(self._threads)
        with worker.beating(job, 0, 1) as heartbeat:
            return worker.train(job, heartbeat, self._phases, ParameterServerExecutor(job.config, cluster))


# Three names, which `ps` and Ray's dashboard show.
class ParameterServer(GroupProcess):
    """Holds weights."""


class ParameterWorker(GroupProcess):
    """Computes gradients."""


class CoordinatorProcess(GroupProcess):
    """Hands out batches."""


def start_server(cluster: dict[str, list[str]], job: str, index: int, threads: int) -> Any:
    """Run a TensorFlow server in this process for as long as the process lives.

    Args:
        cluster, job, index: as for `GroupProcess.join`.
        threads: threads within an operation.
    """
    import tensorflow as tf

    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=threads, inter_op_parallelism_threads=max(4, threads)
    )
    config.gpu_options.allow_growth = True
    return tf.distribute.Server(
        tf.train.ClusterSpec(cluster), job_name=job, task_index=index, protocol="grpc", config=config, start=True
    )
