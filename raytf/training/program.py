"""What a rank trains: the data pipeline, the model, its compiled step, and the identity of the run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import keras
import numpy as np
import ray

from raytf._ray import raylets
from raytf.checkpoint import variables
from raytf.checkpoint.digest import Digest
from raytf.config import precision
from raytf.data.pipeline import DEPTH, Pipeline
from raytf.data.plan import StepPlan, assign
from raytf.data.sources import Source, fingerprint
from raytf.distributed import memory_needs
from raytf.distributed.devices import computes_on_gpu
from raytf.errors import ConfigError
from raytf.inference.user_model import run_user_code, set_log_levels, set_warning_filters
from raytf.training import model as models
from raytf.training import program_variables, remarks, run_identity
from raytf.training.attempt import Attempt
from raytf.training.evaluation_step import EvalStep
from raytf.training.executor import CompiledStep, Executor
from raytf.training.job import Sources, TrainingJob
from raytf.training.upload import Upload

#: Share of a node's memory from which what the state needs is worth a line.
_LARGE_SHARE = 0.02


@dataclass(frozen=True)
class Program:
    """What one rank trains.

    Attributes:
        sources: the run's data.
        pipeline: this rank's shards of the training data.
        model: built and compiled.
        named: all variables of the state, by name.
        step: the training step, which may not be traced yet.
        identity: what must be the same when the run is resumed.
        digests: the hashes of the weights that were made ready, by whether they are of the optimizer, too.
        evaluations: evaluation steps that were made, by the name of their data.
    """

    sources: Sources
    pipeline: Pipeline
    model: keras.Model
    named: dict[str, keras.Variable]
    step: CompiledStep
    identity: dict[str, str]
    digests: dict[bool, Digest] = field(default_factory=dict)
    evaluations: dict[str, EvalStep] = field(default_factory=dict)

    def digest(self, with_optimizer: bool) -> Digest:
        """The hash of the weights."""
        if with_optimizer not in self.digests:
            hashed = ("model/", "optimizer/") if with_optimizer else ("model/",)
            values = [v.value for name, v in self.named.items() if name.startswith(hashed)]
            self.digests[with_optimizer] = Digest(values)
        return self.digests[with_optimizer]


def build(attempt: Attempt, executor: Executor) -> Program:
    """Build the model and its step.

    Raises:
        ConfigError: the node does not have the memory that the state needs, or settings do not fit the model.
        ModelError: the model function does not return a model that can be trained.
        ExactnessError: the run is in exact mode, and the machines do not compute the same bits.
    """
    job = attempt.job
    sources: Sources = ray.get(job.sources)
    if job.settings is not None:
        job.settings.apply()
    with attempt.group.devices.at_home():  # a model in it gets its variables now
        code = run_user_code("unpacking the job", job.code.get)
    set_warning_filters(code.warning_filters)
    set_log_levels(code.log_levels)
    pipeline = open_pipeline(attempt, sources.train, job.plan, training=True)
    with attempt.group.devices.at_home():
        model = _build_model(attempt, sources, pipeline)
    if job.config.strategy.has_servers:
        precision.check_for_servers(models.scaled_policy(model))
    pipeline.prepare(len(variables.seed_states(model)), models.sparse_classes(model))
    identity = _identity(job, sources, model)
    step = executor.make_step(attempt, model, pipeline)
    if not job.config.strategy.has_servers:
        known = [*model.variables, *variables.variables(model).values(), *step.reduction_state().values()]
        known += variables.seed_states(model)
        variables.keep_program(model, program_variables.find(step.probe_function, known))
    named = variables.variables(model)
    if not attempt.earlier:
        for line in remarks.take(model):
            attempt.reporter.say(line)
    identity |= executor.admit(attempt, pipeline)
    if not (job.config.strategy.has_servers or executor.meets_again):  # the place on the node is not known yet
        check_needs(attempt, named)
    return Program(sources, pipeline, model, named, step, identity)


def with_own_shards(attempt: Attempt, program: Program, executor: Executor) -> Program:
    """The program with the shards that this rank has now."""
    plan, group = attempt.job.plan, attempt.group
    pipeline = program.pipeline.of(assign(plan.shards, group.world_size)[group.rank])
    executor.take_shards(pipeline)
    return replace(program, pipeline=pipeline)


def open_pipeline(attempt: Attempt, source: Source, plan: StepPlan, training: bool) -> Pipeline:
    """This rank's shards of a source; only those for training are shuffled and augmented."""
    job, group = attempt.job, attempt.group
    made = Pipeline(
        source,
        plan,
        assign(plan.shards, group.world_size)[group.rank],
        job.config.batch.seed,
        shuffle=training and job.shuffle,
        class_weight=job.class_weight if training else None,
        augment=job.augment if training else None,
    )
    made.send = _upload(attempt)
    return made


def _upload(attempt: Attempt) -> Callable[[list[np.ndarray]], list[Any]]:
    """The function that sends a gathered batch to the GPU ahead of its step, if that is the only device."""
    devices = attempt.group.devices
    if attempt.config.strategy.has_servers or len(devices.names) > 1 or not computes_on_gpu(devices):
        return list
    return Upload(devices.names[0] or "GPU:0", DEPTH + 1)


def _build_model(attempt: Attempt, sources: Sources, pipeline: Pipeline) -> keras.Model:
    job, given = attempt.job, (sources.train, sources.validation, sources.test)
    return models.build(
        job.model,
        pipeline.sample(models.SAMPLE),
        [source for source in given if source is not None],
        job.config.compute,
        job.config.batch.seed,
        attempt.reporter.say,
        job.precision,
        (job.plan.micro_batch_size, job.plan.global_batch_size),
    )


def _identity(job: TrainingJob, sources: Sources, model: keras.Model) -> dict[str, str]:
    identity = run_identity.of_model(models.describe(model), models.code(model, (job.augment,)))
    # Taken from the driver, which has read the data once for all ranks. Only the fingerprint of the training data is
    # computed here, since training reads the records that this node sees.
    known = job.identity or run_identity.of_run(job, sources)
    return identity | known | {"training data": fingerprint(sources.train)}


def check_needs(attempt: Attempt, named: dict[str, keras.Variable]) -> None:
    """Refuse a node that does not have the memory that the state needs; in the first attempt, print what it needs if
    that is much, or if the user wants to know everything."""
    checkpoints = attempt.config.checkpoints
    own = {name: variables.size_of({name: v}) for name, v in named.items()}
    total, largest = sum(own.values()), max(own.values(), default=0)
    weights = sum(size for name, size in own.items() if name.startswith("model/"))
    found = memory_needs.MemoryNeeds(
        weights,
        total - weights,
        max(largest, -(-total // attempt.group.world_size)),
        largest,
        attempt.place[1],
        variables.is_on_host(named),
        checkpoints.snapshot_every_steps != 0,
        checkpoints.keep_best is not None,
    )
    node_bytes = raylets.all_bytes()
    refused = memory_needs.refusal(found, node_bytes, bool(checkpoints.snapshot_every_steps))
    if refused is not None:
        raise ConfigError(refused)
    is_large = found.total >= _LARGE_SHARE * node_bytes
    if not attempt.earlier and (is_large or attempt.config.run.verbose):
        attempt.reporter.say(found.text())
