"""Makes the group for a strategy's name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from raytf.config.sections import StrategySection
from raytf.distributed.group import Group

if TYPE_CHECKING:
    from raytf.distributed.multi_worker import MultiWorkerGroup


def make(section: StrategySection, gpus: float = 0.0) -> Group:
    """The group of a synchronous strategy.

    Call it before any TensorFlow operation, in a process that `worker.set_up` has prepared.

    Args:
        section: names the strategy.
        gpus: GPUs that the cluster has given this process; a fraction where several processes share one.

    Raises:
        ClusterError: the devices are not there.
        GpuError, WorkerLostError: a worker of multi-worker-mirrored does not have the GPU that it was given.
    """
    match section.strategy:
        case "mirrored":
            from raytf.distributed import local

            return local.mirrored()
        case "one-device":
            from raytf.distributed import local

            return local.one_device()
        case "central-storage":
            from raytf.distributed import local

            return local.central_storage()
        case "tpu":
            from raytf.distributed import local

            return local.tpu()
        case _:
            from raytf.distributed import meeting, multi_worker

            return multi_worker.MultiWorkerGroup(meeting.mine(), section.communication, promised=gpus)


def make_again(section: StrategySection, gpus: float = 0.0) -> MultiWorkerGroup:
    """As `make`, for a worker of multi-worker-mirrored that is alone until it meets others, again and again."""
    from raytf.distributed import meeting, multi_worker

    mine = meeting.mine()
    alone = meeting.Meeting(0, (mine.addresses[mine.rank],), mine.key)
    return multi_worker.MultiWorkerGroup(alone, section.communication, promised=gpus, meets_again=True)
