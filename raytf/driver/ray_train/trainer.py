"""Ray Train's TensorflowTrainer with raytf's policies, and how it ends workers that hang."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
import ray.train

from raytf._ray import partial_group
from raytf._ray.train import TensorflowTrainer, WorkerGroupCallback
from raytf.cluster import connect
from raytf.config.sections import ClusterSection
from raytf.distributed.arbiter_link import ArbiterAddress
from raytf.driver.ray_train import controller_process
from raytf.driver.ray_train.failure_policy import FailurePolicy
from raytf.driver.ray_train.scaling_policy import PolicyContext, ScalingPolicy
from raytf.driver.supervision.supervisor import Supervisor
from raytf.training.process.monitor_client import MonitorClient

#: Seconds that all workers have to end by themselves; Ray would wait 5 s for each one that hangs.
_END_SECONDS = 0.5


#: Ray Train's callbacks that are left out: the first would change the workers' folder, while a job's relative paths
#: mean those of the driver; the second starts a process with Ray Data for each group, which raytf does not use; the
#: third starts one that cannot tell without Ray's dashboard whether a controller lives: see `remove_abandoned`.
_LEFT_OUT = ("WorkingDirectorySetupCallback", "DatasetsCallback", "PlacementGroupCleanerCallback")


class Trainer(TensorflowTrainer):
    """TensorflowTrainer with raytf's policies.

    Args:
        train_loop: run by each worker.
        run: name of the run on this cluster.
        monitor: the driver's.
        run_uri: the run's folder.
        flags: of the cluster.
        keeps_kind: keep one kind of GPU: another kind would not compute the promised bits.
        arbiter: of workers that come and go while the others train; None where all start together.
        look: called a few times a second while the controller runs; what it raises ends it.
        **kwargs: Ray Train's own arguments.
    """

    def __init__(
        self,
        train_loop: Callable[[], Any],
        run: str,
        monitor: MonitorClient,
        run_uri: str,
        flags: ClusterSection,
        keeps_kind: bool = False,
        arbiter: ArbiterAddress | None = None,
        look: Callable[[], None] = lambda: None,
        **kwargs: Any,
    ):
        self._run, self._monitor, self._run_uri, self._flags = run, monitor, run_uri, flags
        self._keeps_kind, self._arbiter, self._look = keeps_kind, arbiter, look
        # Past TensorflowTrainer's own __init__, which only fills in a default backend and imports TensorFlow for it.
        super(TensorflowTrainer, self).__init__(train_loop, **kwargs)

    def _initialize_and_run_controller(self, **kwargs: Any) -> Any:
        hangs = self._run_uri if self._flags.hang_seconds else None
        supervisor = Supervisor()
        kwargs["failure_policy"] = FailurePolicy(
            self.run_config.failure_config, self._monitor, hangs, supervisor, self._arbiter is not None
        )
        about = PolicyContext(
            self._run,
            self._monitor,
            self._run_uri,
            self._flags,
            supervisor,
            self._keeps_kind,
            connect.is_own(),
            self._arbiter,
        )
        kwargs["scaling_policy"] = ScalingPolicy(self.scaling_config, about)
        return partial_group.run(controller_process.variables(), kwargs, self._arbiter is not None, self._look)

    def _create_default_callbacks(self) -> list[Any]:
        made = super()._create_default_callbacks()
        return [c for c in made if type(c).__name__ not in _LEFT_OUT] + [HungWorkerTeardown()]


class HungWorkerTeardown(WorkerGroupCallback):
    """Ends workers that hang, before Ray waits for them."""

    def before_worker_group_shutdown(self, worker_group: Any) -> None:
        answers = {worker.actor.shutdown.remote(): worker.actor for worker in worker_group.get_workers()}
        hanging = ray.wait(list(answers), num_returns=len(answers), timeout=_END_SECONDS)[1]
        for answer in hanging:
            ray.kill(answers[answer])
