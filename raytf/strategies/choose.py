"""From the name of a way to distribute to the group."""

from __future__ import annotations

from raytf.sections import StrategySection
from raytf.strategies.interface import Group


def make(section: StrategySection, gpus: float = 0.0) -> Group:
    """The group of a synchronous strategy; before any TensorFlow operation, in a process that `worker.set_up` made.

    Args:
        gpus: that the cluster has given this process; a fraction where several share one.

    Raises:
        ClusterError: the devices are not there.
        GpuError, WorkerLostError: a worker of multi-worker-mirrored has not got the GPU that it was given.
    """
    match section.strategy:
        case "mirrored":
            from raytf.strategies import mirrored

            return mirrored.make()
        case "one-device":
            from raytf.strategies import one_device

            return one_device.make()
        case "central-storage":
            from raytf.strategies import central_storage

            return central_storage.make()
        case "tpu":
            from raytf.strategies import tpu

            return tpu.make()
        case _:
            from raytf.strategies import multi_worker

            return multi_worker.Group(section.communication, promised=gpus)
