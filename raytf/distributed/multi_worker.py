"""MultiWorkerMirroredStrategy as raytf uses it: with this worker's device, and TensorFlow's collectives if needed.

A worker has one device, so its shards are computed one after another. Only the reduction runs through `strategy.run`.
Every rank applies the same reduced gradient to the same values, so the copies stay equal without a mirrored container;
`raytf.distributed` explains the benefits. BatchNorm statistics are reduced with the gradients instead of diverging.

Everything but gradients is sent over CPUs (`control_plane`). The path of gradients depends on where the ranks compute
(`routes`): from GPU to GPU if each rank has its own GPU, otherwise over the hosts, which needs no network on a single
host. TensorFlow's own cluster, with a server in each process, exists only if its collectives may be needed. Otherwise,
each rank has a strategy of one worker.
"""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from hashlib import sha256
from typing import Any

import numpy as np
import tensorflow as tf

from raytf import _tensorflow
from raytf._process import in_thread
from raytf.config.flags import Communication
from raytf.distributed.allreduce import routes
from raytf.distributed.allreduce.control_plane import ControlPlane, RingPlane, SocketPlane
from raytf.distributed.allreduce.host import HostSum, host_identity
from raytf.distributed.allreduce.reduction import packed
from raytf.distributed.allreduce.routes import RankSeat, SumPath, SumRoute
from raytf.distributed.devices import Devices
from raytf.distributed.gpu import nvidia_driver
from raytf.distributed.membership.rendezvous import Meeting
from raytf.errors import GpuError, WorkerLostError

#: Milliseconds without a heartbeat after which TensorFlow considers a worker dead (default: 10 s). Workers send two
#: heartbeats in this time. They need no interpreter lock and almost no CPU, so a loaded machine does not delay them.
_HEARTBEAT_TIMEOUT_MS = 6000
#: Seconds for NCCL to connect all GPUs. It usually takes one or two; if it cannot connect them, it waits forever.
NCCL_SECONDS = 60.0

#: Returns (id of this process's GPU, its kind), or None if TensorFlow finds no GPU.
OwnGpu = Callable[[], tuple[str, str] | None]


def own_gpu() -> tuple[str, str] | None:
    """Return the id (a UUID) and the kind of the GPU on which TensorFlow computes in this process, or None without a
    GPU."""
    if not tf.config.list_logical_devices("GPU"):
        return None
    gpus = nvidia_driver.mine()
    if gpus:
        return gpus[0].uuid, gpus[0].name
    # The UUID is unknown, but no two GPUs on a host have the same number.
    return sha256(f"{host_identity()} {os.environ.get('CUDA_VISIBLE_DEVICES', '')}".encode()).hexdigest(), ""


class MultiWorkerGroup:
    """This worker's place among the workers, and their sum. A `raytf.distributed.group.Group`.

    Create it before any TensorFlow operation. If it needs TensorFlow's cluster, it reads TF_CONFIG, which Ray Train's
    backend has set.

    Args:
        meeting: this worker's place and the addresses of all workers.
        communication: how gradients are added; with `ring`, ranks do not share the memory of their host.
        host: returns an id that is equal for all processes that can share memory, or None for none.
        promised: GPUs that the cluster has assigned to this worker; a fraction if several workers share one.
        gpu: returns this process's GPU.
        meets_again: whether `meet_again` may be called, even if the worker is alone now.

    Attributes:
        rank: this worker's rank.
        world_size: number of workers.
        route: path that gradients take, and why; None for a single worker.

    Raises:
        GpuError: this worker does not have the GPU assigned to it, or NCCL does not connect the GPUs.
        WorkerLostError: another worker does not have its GPU, or does not respond.
        ConfigError: NCCL was requested but cannot be used.
    """

    def __init__(
        self,
        meeting: Meeting,
        communication: Communication = "auto",
        host: Callable[[], str | None] = host_identity,
        promised: float = 0.0,
        gpu: OwnGpu = own_gpu,
        meets_again: bool = False,
    ) -> None:
        self.devices: Devices = Devices()
        self.rank, self.world_size = meeting.rank, meeting.world_size
        self.route: SumRoute | None = None
        self._communication: Communication = communication
        self._seat = lambda: _seat(host(), promised, gpu())
        self._control: ControlPlane | None = None
        has_cluster = self.world_size > 1 and routes.needs_cluster(communication, promised)
        self.strategy = _strategy_in_cluster(meeting) if has_cluster else _strategy_alone()
        if self.world_size == 1 and not meets_again:
            _check_gpus([self._seat()], 0)
            return
        self._control = RingPlane(self.rank, self.world_size) if has_cluster else SocketPlane(meeting)
        self._take_route()

    @property
    def loss(self) -> str:
        """Why the last sum failed, if a worker was lost. Empty if no sum failed, or if the ranks cannot meet again."""
        return self._control.loss if isinstance(self._control, SocketPlane) else ""

    def meet_again(self, meeting: Meeting) -> None:
        """Join another meeting, as another rank and with other workers. Graphs traced with `all_reduce` stay valid.

        Raises:
            WorkerLostError: the workers cannot reach each other.
        """
        assert isinstance(self._control, SocketPlane)
        self._control.join(meeting)
        self.rank, self.world_size = meeting.rank, meeting.world_size
        self._take_route()

    def leave(self) -> None:
        """Close the connections, so that workers that wait for this one notice that it is gone."""
        if isinstance(self._control, SocketPlane):
            self._control.leave()

    @property
    def on_host(self) -> HostSum | None:
        """The sum over the workers of this host, or None if it has only one."""
        return None if self._control is None else self._control.on_host

    def all_reduce(self, tensors: list[tf.Tensor]) -> list[tf.Tensor]:
        if self._control is None or self.route is None:
            return [tf.identity(t) for t in tensors]
        # The strategy's collective adds gradients on the devices that compute: GPUs, if there are any.
        return packed(self._strategy_sum)(tensors) if self.route.path.is_collective else self._control.add(tensors)

    def _strategy_sum(self, tensor: tf.Tensor) -> tf.Tensor:
        assert self.route is not None
        experimental = tf.distribute.experimental
        name = {SumPath.NCCL: "NCCL", SumPath.RING: "RING"}.get(self.route.path, "AUTO")
        # Pass the options with each call, because the strategy is created before the path is known.
        options = experimental.CommunicationOptions(implementation=experimental.CommunicationImplementation[name])
        return self.strategy.run(_replica_sum, args=(tensor, options))

    def sum(self, values: np.ndarray) -> np.ndarray:
        """Return the sum of an array over all workers, computed at once.

        Raises:
            tf.errors.UnavailableError: or another error of TensorFlow, if a worker is gone.
        """
        return values if self._control is None else self._control.sum(values)

    def share(self, data: bytes, giver: int = 0) -> bytes:
        return data if self._control is None else self._control.share(data, giver)

    def broadcast(self, arrays: list[np.ndarray], giver: int = 0) -> list[np.ndarray]:
        return arrays if self._control is None else self._control.broadcast(arrays, giver=giver)

    def hand(self, arrays: list[np.ndarray], givers: Sequence[int], takers: Sequence[int]) -> list[np.ndarray]:
        return self._control.hand(arrays, givers, takers) if isinstance(self._control, SocketPlane) else arrays

    def _take_route(self) -> None:
        """Exchange where each worker computes, and choose the route accordingly."""
        assert self._control is not None
        seats = [RankSeat.of_row(row) for row in self._control.gather(self._seat().to_row())]
        _check_gpus(seats, self.rank)
        self.route = routes.choose(self._communication, seats)
        assert isinstance(self._control, RingPlane) or not self.route.path.is_collective, "it has no cluster"
        if self.route.path is not SumPath.RING:
            self._control.meet([s.host for s in seats], [s.token for s in seats])
        if self.route.path is SumPath.NCCL:
            within(NCCL_SECONDS, self._connect)

    def _connect(self) -> None:
        """Compute a first sum, during which NCCL connects all GPUs."""
        first = tf.function(lambda: self.all_reduce([tf.ones([1])])[0], autograph=False)
        total = float(first()[0])
        if total != self.world_size:
            raise GpuError(f"NCCL's sum of {self.world_size} ones is {total:g}. {_WITHOUT_NCCL}")


def _strategy_in_cluster(meeting: Meeting) -> tf.distribute.Strategy:
    """Return a strategy with a TensorFlow server at this rank's address."""
    try:
        meeting.server().close()  # frees the port for TensorFlow
    except OSError as error:
        raise WorkerLostError(f"rank {meeting.rank} cannot listen at its address: {error}") from None
    # Without this call, the strategy would configure the same service with TensorFlow's default timeout.
    _tensorflow.watch_workers(meeting.world_size, _HEARTBEAT_TIMEOUT_MS)
    return tf.distribute.MultiWorkerMirroredStrategy()


def _strategy_alone() -> tf.distribute.Strategy:
    """Return a strategy of this process's own devices, ignoring TF_CONFIG."""
    own = {"GPU": len(tf.config.list_logical_devices("GPU"))}
    alone = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec({}), num_accelerators=own)
    return tf.distribute.MultiWorkerMirroredStrategy(cluster_resolver=alone)


def within(seconds: float, connect: Callable[[], None]) -> None:
    """Call `connect`, in which NCCL connects the GPUs, with a time limit. NCCL itself has none.

    Raises:
        GpuError: the time is over. The hanging thread ends with the process.
    """
    job = in_thread(connect, "raytf-nccl")
    wait([job], seconds)
    if not job.done():
        raise GpuError(f"NCCL has not connected the workers' GPUs in {seconds:g} s. {_WITHOUT_NCCL}", is_doubtful=True)
    job.result()


_WITHOUT_NCCL = (
    "To see why, set NCCL_DEBUG=INFO in the workers' environment; often it is the network (NCCL_SOCKET_IFNAME). To "
    "train without NCCL, use --communication host."
)


def _seat(host: str | None, promised: float, gpu: tuple[str, str] | None) -> RankSeat:
    token = secrets.token_hex(16)
    # A process that cannot share memory counts as alone on its host.
    shared = token if host is None else sha256(host.encode()).hexdigest()
    identity, kind = gpu or (None, "")
    return RankSeat(shared, token, platform.node(), promised, identity, kind)


def _check_gpus(seats: Sequence[RankSeat], rank: int) -> None:
    """Check that every rank has its GPU.

    Raises:
        GpuError: this rank does not have the GPU assigned to it.
        WorkerLostError: another rank does not have its GPU.
    """
    lacking = routes.without_gpu(seats)
    if not lacking:
        return
    missing = rank if rank in lacking else lacking[0]
    text = (
        f"rank {missing} on {seats[missing].node} was given {seats[missing].promised:g} GPU, but TensorFlow finds none "
        "there. Check the node's driver (nvidia-smi)."
    )
    raise GpuError(text) if missing == rank else WorkerLostError(text)


def _replica_sum(tensor: tf.Tensor, options: Any) -> Any:
    # Copy the tensor on the replica's device: the collective reads a tensor's device, which a traced tensor lacks.
    mine = tf.identity(tensor)
    return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, mine, options=options)
