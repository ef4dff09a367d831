"""Ray Train's backend for MultiWorkerMirroredStrategy: prepares each worker's process for its place in the group."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig

from raytf._ray import train
from raytf.distributed.membership.rendezvous import Meeting
from raytf.errors import GpuError
from raytf.training.process.process import ProcessSettings


@dataclasses.dataclass
class MwmsConfig(BackendConfig):
    """Ray Train's TensorFlow backend without its imports.

    Ray's own configuration imports TensorFlow in the controller (10 s) and sets TF_USE_LEGACY_KERAS in every worker.

    Attributes:
        process: settings of each worker's process.
    """

    process: ProcessSettings = dataclasses.field(default_factory=ProcessSettings)

    @property
    def backend_cls(self) -> type[Backend]:
        return _MwmsBackend


class _MwmsBackend(Backend):
    def on_start(self, worker_group: Any, backend_config: BackendConfig) -> None:
        try:
            self._set_up(worker_group, backend_config)
        except ray.exceptions.RayError as error:
            # Ray Train considers a group that fails after this point complete: it would drop the group without ending
            # it, and the CPUs of its placement group would be lost to the run.
            if hasattr(worker_group, "get_replica_groups"):  # the group, and not one worker that is replaced
                train.drop(worker_group)
            cause = getattr(error, "cause", None)
            if isinstance(cause, GpuError):
                # Ray Train makes no second attempt after other errors.
                raise train.WorkerGroupStartupFailedError(cause) from None
            raise

    def _set_up(self, worker_group: Any, config: BackendConfig) -> None:
        from raytf.training import worker

        assert isinstance(config, MwmsConfig)
        addresses = tuple(worker_group.execute(worker.listen))
        key = secrets.token_bytes(32)
        started = [
            worker_group.execute_single_async(rank, worker.set_up, Meeting(rank, addresses, key), config.process)
            for rank in range(len(worker_group))
        ]
        ray.get(started)
