"""One rank of one attempt: its place among the other ranks, and the objects that it reports to."""

from __future__ import annotations

import json
from dataclasses import dataclass

from raytf.checkpoint.memory import place_on_node
from raytf.cluster.preemption import watcher
from raytf.config.train_config import TrainConfig
from raytf.distributed import ranks, worker_table
from raytf.runs.restart_phases import Phases
from raytf.runs.run_log import new_attempt
from raytf.storage.storage import Storage
from raytf.training import gpu_probe
from raytf.training.executor import Executor
from raytf.training.heartbeat import Heartbeat, WatchedGroup
from raytf.training.job import TrainingJob
from raytf.training.reporter import Reporter


@dataclass(frozen=True)
class Attempt:
    """This rank in one attempt.

    Attributes:
        job: the run to train.
        pulse: this rank's heartbeat.
        phases: phases of the restart; each is marked when it ends.
        group: this rank's collectives with all ranks.
        name: name of the attempt.
        earlier: names of the attempts before it.
        known_step: step of the newest checkpoint on storage; None if the driver does not know it.
        place: (this rank's index on its node, number of ranks on the node).
        workers: number of processes that compute gradients.
        storage: the run's folder.
        reporter: sends this rank's messages, events and metrics.
    """

    job: TrainingJob
    pulse: Heartbeat
    phases: Phases
    group: WatchedGroup
    name: str
    earlier: tuple[str, ...]
    known_step: int | None
    place: tuple[int, int]
    workers: int
    storage: Storage
    reporter: Reporter

    @property
    def config(self) -> TrainConfig:
        return self.job.config


def join(job: TrainingJob, pulse: Heartbeat, phases: Phases, executor: Executor) -> Attempt:
    """Join the other ranks of the newest attempt; every rank must call it.

    Raises:
        GpuError, WorkerLostError: a rank does not have the GPU that it was assigned, or the GPU miscalculates.
        ClusterError: the devices of the strategy do not exist.
    """
    strategy = job.config.strategy
    group = WatchedGroup(executor.join(), pulse)
    name, earlier, known_step = _begin(job, group)
    if not strategy.has_servers:  # the coordinator has no GPU
        gpu_probe.check()
    phases.mark("rendezvous")
    place = place_on_node(group)
    ranks.take(ranks.RankInfo(group.rank, group.world_size, *place))
    storage = Storage(job.run_uri)
    reporter = Reporter(job, storage, group.rank, executor.workers, name)
    if group.route is not None and group.route.why:
        reporter.say(str(group.route))
    if strategy.show_cluster and not strategy.has_servers:  # with parameter servers, the driver shows the cluster
        worker_table.show(group, strategy.strategy, place[0], reporter.say)
    watcher.start_in_worker(job.config.notices, job.run_uri, reporter.say_here, reporter.event)
    return Attempt(
        job, pulse, phases, group, name, tuple(earlier), known_step, place, executor.workers, storage, reporter
    )


def _begin(job: TrainingJob, group: WatchedGroup) -> tuple[str, list[str], int | None]:
    """Name the attempt and announce it to the driver.

    Returns:
        Its name, the names of the attempts before it, and the step of the newest checkpoint on storage; None if the
        driver does not know that step.
    """
    begun = b""
    if group.rank == 0:
        name = new_attempt()
        begun = json.dumps((name, *job.monitor.begin(name))).encode()
    # Ray's own broadcast would wait for an actor that starts with the group.
    name, earlier, known_step = json.loads(group.share(begun))
    return name, earlier, known_step
