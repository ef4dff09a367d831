"""One rank of one attempt: its place among the other ranks, and the objects that it reports to."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from raytf.checkpoint.memory import place_on_node
from raytf.checkpoint.void import VoidStates
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
        is_saving: whether a later one may be on storage.
        place: (this rank's index on its node, number of ranks on the node).
        workers: number of processes that compute gradients.
        storage: the run's folder.
        reporter: sends this rank's messages, events and metrics.
        lost: how many workers were lost since the last step that was trained, of a group that goes on without them.
        void: states that count no more.
        standings: by Ray's id of a node, the step since which it trains, and that of its latest audit that agreed.
    """

    job: TrainingJob
    pulse: Heartbeat
    phases: Phases
    group: WatchedGroup
    name: str
    earlier: tuple[str, ...]
    known_step: int | None
    is_saving: bool
    place: tuple[int, int]
    workers: int
    storage: Storage
    reporter: Reporter
    lost: int = 0
    void: VoidStates = field(default_factory=VoidStates)
    standings: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def config(self) -> TrainConfig:
        return self.job.config


def join(job: TrainingJob, pulse: Heartbeat, phases: Phases, executor: Executor) -> Attempt:
    """Join the other ranks of the newest attempt; every rank must call it.

    Raises:
        GpuError, WorkerLostError: a rank does not have the GPU that it was assigned, or the GPU miscalculates.
        ClusterError: the devices of the strategy do not exist.
    """
    group = WatchedGroup(executor.join(), pulse)
    attempt = _alone(job, pulse, phases, executor, group, group.rank)
    attempt = begin(attempt, executor, pulse.group)
    phases.mark("rendezvous")
    introduce(attempt)
    return attempt


def prepare(job: TrainingJob, pulse: Heartbeat, phases: Phases, executor: Executor) -> Attempt:
    """This rank before it has met the others, where that comes after the model is built: see `begin`.

    Raises:
        GpuError: it does not have the GPU that it was assigned, or that miscalculates.
    """
    group = WatchedGroup(executor.join(), pulse)
    ranks.take(executor.seat)  # for the model function
    return _alone(job, pulse, phases, executor, group, 0 if executor.speaks_alone else 1)


def begin(before: Attempt, executor: Executor, number: int) -> Attempt:
    """Start the attempt of ranks that have met; every rank must call it.

    Args:
        before: this rank.
        executor: will train the steps.
        number: of the generation, or of the worker group where ranks do not meet again. It orders the attempts of a
            driver, also those of a rank that was suspended and takes its next step late.
    """
    job, group = before.job, before.group
    name, earlier, known_step, is_saving, void, standings = _begin(job, group, number)
    place = place_on_node(group)
    ranks.take(ranks.RankInfo(group.rank, group.world_size, *place))
    before.reporter.take_place(group.rank, executor.workers, name)
    return replace(
        before,
        name=name,
        earlier=tuple(earlier),
        known_step=known_step,
        is_saving=is_saving,
        place=place,
        workers=executor.workers,
        void=VoidStates.of(void),
        standings=standings,
    )


def introduce(attempt: Attempt, is_late: bool = False) -> None:
    """Say where the ranks are, and watch for notices.

    Args:
        attempt: that begins.
        is_late: the others have done so before.
    """
    group, strategy, reporter = attempt.group, attempt.config.strategy, attempt.reporter
    if group.route is not None and group.route.why:
        reporter.say(str(group.route))
    # With parameter servers, the driver shows the cluster.
    if strategy.show_cluster and not strategy.has_servers and not is_late:
        worker_table.show(group, strategy.strategy, attempt.place[0], reporter.say)
    watcher.start_in_worker(attempt.config.notices, attempt.job.run_uri, reporter.say_here, reporter.event)


def _alone(
    job: TrainingJob, pulse: Heartbeat, phases: Phases, executor: Executor, group: WatchedGroup, rank: int
) -> Attempt:
    if not job.config.strategy.has_servers:  # the coordinator has no GPU
        gpu_probe.check()
    storage = Storage(job.run_uri)
    reporter = Reporter(job, storage, rank, executor.workers, "")
    return Attempt(job, pulse, phases, group, "", (), None, False, (0, 1), executor.workers, storage, reporter)


def _begin(job: TrainingJob, group: WatchedGroup, number: int) -> tuple[str, list[str], int | None, bool, Any, Any]:
    """Name the attempt and announce it to the driver.

    Returns:
        Its name, the names of the attempts before it, the step of the newest checkpoint on storage, None if the
        driver does not know that step; whether a later one may be on storage; states that are void, and standings of
        nodes.
    """
    begun = b""
    if group.rank == 0:
        name = new_attempt(number=(job.term, number))
        before = job.monitor.begin(name)
        begun = json.dumps((name, *before, job.monitor.is_saving(), *job.monitor.past())).encode()
    # Ray's own broadcast would wait for an actor that starts with the group.
    name, earlier, known_step, is_saving, void, standings = json.loads(group.share(begun))
    return name, earlier, known_step, is_saving, void, standings
