"""`fit`: from a configuration to a finished run, on the driver's side."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Unpack

import ray

from raytf.audit import step_replay
from raytf.checkpoint import invalidated_states, memory_keeper
from raytf.cluster import ray_watch
from raytf.cluster.connect import is_connected
from raytf.config import identity, program
from raytf.config.keywords import FitSettings, Settings
from raytf.config.train_config import TrainConfig
from raytf.data.pipeline import Augment
from raytf.data.plan import BatchPlan
from raytf.data.sources.batches import LiveBatches, plan_of
from raytf.data.streams import Stream
from raytf.driver import model_dry_run, preflight, run_names
from raytf.driver.arbiter import arbitrating
from raytf.driver.connection import has_trained, staying_connected
from raytf.driver.feed import feeding
from raytf.driver.graceful_stop import saved_before, saving_first
from raytf.driver.model_dry_run import Rehearsal, has_own_environment, rehearsing
from raytf.driver.monitor.reader import MonitorReader, RunLedger, add_times, booked, exported, listening, monitoring
from raytf.driver.ray_train.warm_processes import start_ahead
from raytf.driver.resolve import FitArguments, FitCall, resolve
from raytf.driver.result import Result, result_of, summary
from raytf.driver.tracking import follow
from raytf.driver.tracking.trackers import CallbackTracker
from raytf.errors import CheckpointError, ClusterError, RaytfError, WholeBatchError, one_line
from raytf.runs import digest_log, ledger, notebook, run_log, start_command, ui_address
from raytf.runs.display import Display, stream_of
from raytf.runs.events import Driver
from raytf.runs.lease import Lease, check_owner
from raytf.runs.status import StatusFile
from raytf.storage import strict_json
from raytf.storage.storage import Storage
from raytf.training import run_identity
from raytf.training.job import Sources, TrainingJob


def fit(
    model: Any,
    x: Any = None,
    y: Any = None,
    *,
    batch_size: int | None = None,
    epochs: int | None = None,
    verbose: int | str = "auto",
    callbacks: Any = None,
    validation_split: float = 0.0,
    validation_data: Any = None,
    shuffle: bool | str = True,
    class_weight: dict[int, float] | None = None,
    sample_weight: Any = None,
    initial_epoch: int = 0,
    steps_per_epoch: int | None = None,
    validation_steps: int | None = None,
    validation_batch_size: int | None = None,
    validation_freq: int | list[int] = 1,
    train: Any = None,
    validation: Any = None,
    test: Any = None,
    config: TrainConfig | None = None,
    augment: Augment | None = None,
    **settings: Unpack[FitSettings],
) -> Result:
    """Train a Keras model on Ray workers; resume where an earlier call with the same run name stopped.

    Accepts the arguments of `keras.Model.fit`, and all settings of a run: `fit(model, x, y, workers="1:4", run="a")`. A
    setting of `config` that differs from its default overrides an argument, and an argument overrides a default. raytf
    prints a line for each overruled argument.

    Args:
        model: a compiled keras.Model, or a function without arguments that returns one. A model is sent to the workers
            with its weights, the state of its optimizer and the program's classes, and has the trained weights
            afterwards. A function runs on every worker.
        x: inputs: an array, a nested dict or list of arrays, a tensor or a pandas table. Or inputs with targets: a
            Source; a tuple (x, y) or (x, y, sample_weight); a data set with `len()` and `[i]` (see MappingSource); a
            Ray Dataset, which is written once to `data/` in the run's folder and read from there (see RayDataSource);
            or ready-made batches, one per step: a tf.data.Dataset, a keras.utils.PyDataset or a generator.
        y: targets, if they are not in x.
        batch_size: records per step, over all workers together. Default: the batch size of `config`; without `config`,
            32 if x has arrays, else 128. Ready-made batches ignore it, as in Keras.
        epochs: passes over the data.
        verbose: "auto" or 1 shows a bar on a terminal, a widget in a notebook and lines elsewhere. 0 shows nothing. Any
            other value, such as 2, shows a line for each epoch.
        callbacks: a list of Keras callbacks, or a function that takes the folder for their files and returns such a
            list. The folder becomes `files/` in the run's folder. Callbacks run on rank 0.
        validation_split: fraction of the arrays that is held out for validation, the last records; ignored with
            validation_data.
        validation_data: as x, or a tuple (x, y) or (x, y, sample_weight); evaluated at the end of the epochs that
            `validation_freq` selects.
        shuffle: whether each epoch has its own order. "batch" keeps the records of each batch together.
        class_weight: weight of each class, by the rules of Keras.
        sample_weight: weight of each record.
        initial_epoch: number of the first epoch, counted from 0; the last one is `epochs` - 1, as in Keras.
        steps_per_epoch: batches per epoch, for arrays and ready-made batches. The next epoch continues where the last
            one ended. An epoch that reaches the end of the data ends there, as in Keras.
        validation_steps: number of batches at the start of the validation data to evaluate; by default all.
        validation_batch_size: records per batch for `validation_steps`, if the validation data is arrays.
        validation_freq: epochs between validations, or a list of the epochs (counted from 1) at which validation runs.
        train, validation: other names for x and validation_data.
        test: as validation_data; evaluated once at the end.
        config: settings from elsewhere, such as the flags of a command.
        augment: a function ((x, y, sample_weight), seed) -> (x, y, sample_weight) of tensors, called for each
            micro-batch with an int32 seed [2] that is a function of the run's seed, the step and the shard.
        **settings: settings of the run, by the names of the flags, which docs/reference/settings.md lists.

    Returns:
        The result of the run, even if it had already finished.

    Raises:
        RaytfError: something is wrong; the message says in one line what, and how to fix it.
        StepsComputed: `raytf replay` or `raytf prove` runs the program, and has computed its steps. Uncaught, this
            SystemExit ends the program with code 0.
    """
    call = resolve(FitArguments(**locals()))
    del x, y, sample_weight, train, validation, validation_data, test  # may be large, and `call` has what is needed
    with call.config.named_as_typed(), _next_command_shown(call.verbose):
        run, job, document = _place_and_run(call)
        if call.replay is not None:
            raise step_replay.StepsComputed(0)
        return result_of(run, document, model, call.callbacks, job)


@contextlib.contextmanager
def _next_command_shown(verbose: int) -> Iterator[None]:
    """Show the next command after a checkpoint error in a new run, since the same command would start another run."""
    try:
        yield
    except CheckpointError:
        if program.change():
            print(f"to continue: {program.next_command().rstrip(',')}", file=stream_of(verbose), flush=True)
        raise


def _place_and_run(call: FitCall) -> tuple[Storage, TrainingJob, dict[str, Any]]:
    """Choose the run's folder, write data to it if necessary, and train. Return the folder, the job and the result."""
    config, replay, lines = call.config, call.replay, list(call.overruled)
    if not is_connected():
        preflight.cpus_here(config)  # refuses more workers than this machine can hold, before anything is written
    status_file = StatusFile(config.run.status_file)
    storage = Storage(config.storage_uri)
    storage.preflight()
    if replay is None:
        config = run_names.settled(config, call.program, call.is_named, lines.append)
    run = storage.child(config.run.name)
    preflight.check_folder(run)
    if replay is None:
        step_replay.check_other_run(run)
    sources = call.data.sources(run, config.batch.pipeline, call.arguments.validation_steps, call.verbose)
    original = run if replay is None else Storage(replay.run)
    stored = preflight.stored_identity(original)
    preflight.compare_strategy(stored, config)
    code, has_old_digests = call.code(), digest_log.are_old(original, run_log.STEPS)

    def say(line: str) -> None:
        print(line, file=stream_of(call.verbose), flush=True)

    for line in lines:
        say(line)

    def train(config: TrainConfig) -> tuple[Storage, TrainingJob, dict[str, Any]]:
        job = call.job(config, code, sources, run.uri, has_old_digests)
        reporting = call.reporting if replay is None else []
        tracker = CallbackTracker(run, reporting, call.arguments.model, job) if reporting else None
        return run, job, _Driver(run, sources, call.data.stream, stored, status_file, tracker).run(job)

    try:
        return train(_with_shards_of(stored, config, say))
    except WholeBatchError:  # before its first step
        if config.batch.logical_shards is not None:
            raise
        say("the model accepts only whole batches: one worker computes each batch")
        return train(config.replace(**_ONE_SHARD))


#: Settings with which batches are not divided.
_ONE_SHARD: Settings = {"logical_shards": 1, "workers": "1"}


def _with_shards_of(stored: dict[str, str], config: TrainConfig, say: Callable[[str], None]) -> TrainConfig:
    """Return the settings with the logical shards that the run was made with, unless the user gave a number."""
    shards = preflight.stored_shards(stored) if config.batch.logical_shards is None else None
    if shards is None:
        return config
    if shards == 1 and config.worker_range[1] > 1:  # its step takes whole batches, or it began with one GPU
        say("the run has one logical shard, so one worker trains")
        config = config.replace(**_ONE_SHARD)
    config = config.replace(logical_shards=shards)
    config.check()
    return config


@dataclasses.dataclass(frozen=True)
class _Driver:
    """Trains a run on Ray.

    Attributes:
        folder: the run's folder.
        stream: the batches of the training data, if it has batches.
        stored: settings that the run was made with; empty for a new run.
        status_file: shows the progress to programs.
        tracker: the program's tracker callbacks, if it has any.
    """

    folder: Storage
    sources: Sources
    stream: Stream | None
    stored: dict[str, str]
    status_file: StatusFile
    tracker: CallbackTracker | None

    def run(self, job: TrainingJob) -> dict[str, Any]:
        """Train to the end, unless the run has already finished. Return the contents of `result.json`."""
        run, name = self.folder, job.config.run_name
        with notebook.display(job.verbose, job.config.run.verbose) as display:
            display.say(f"run {name} in {run.locate('')}")
            # Ray's dashboard has no page for runs of Ray Train; it shows this line as part of the job's log.
            page = ui_address.page_of(run.uri)
            display.say(f"its page: {page}" if page else f"its page, at any time: {ui_address.command_for(run)}")
            with Lease(run, display.say, latest_term=partial(ledger.latest_term, run)) as lease:
                finished = preflight.finished(run, job.total_steps, display.say)
                preflight.compare_batch(self.stored, job.config, job.plan.records, job.precision)
                if finished is not None:
                    self._report_finished(job, finished, display.say)
                    return finished
                run_log.abort_uploads(run)
                own = run_identity.of_run(job, self.sources)
                document = self._train(dataclasses.replace(job, identity=own, term=lease.owner["term"]), display, lease)
            display.say(summary(document))
            return document

    def _report_finished(self, job: TrainingJob, finished: dict[str, Any], say: Callable[[str], None]) -> None:
        model_dry_run.compare(job, self.sources, model_dry_run.stored(finished) or self.stored, say)
        if not follow.has_all(job.config, self.folder, self.tracker):  # the last start was killed, or had no trackers
            with follow.tracked(job.config, self.folder, say, self.tracker):
                pass
        how = identity.beside(job.config)
        say(f"run {job.config.run_name} has finished ({finished['steps']} steps); nothing to do. {how}")

    def _train(self, job: TrainingJob, display: Display, lease: Lease) -> dict[str, Any]:
        run, stored = self.folder, self.stored
        command = start_command.of_process(program.of_process(notebook.in_notebook()).path)
        with start_command.recorded(run, command) as is_same:
            # Compare the model if it may be another one: the run had finished, or another command started it.
            before = stored if stored and (run.exists(run_log.RESULT) or not is_same) else None
            is_late = has_trained() or job.stop_step is not None or self.stream is not None
            train = None if is_late or (stored and before is None) else self.sources.train
            with (
                follow.tracked(job.config, run, display.say, self.tracker),
                booked(run, job.config, lease.owner["term"]) as book,
                rehearsing(job, train, before) as rehearsal,
            ):
                with staying_connected(job.config, display.stage) as local:
                    document = self._train_on_ray(job, local, display, lease, book, rehearsal)
                book.note(Driver("ended", outcome="finished"))
                add_times(document, run, book)
                run.put(run_log.RESULT, strict_json.dumps(document, indent=1).encode())
        return document

    def _train_on_ray(
        self, job: TrainingJob, local: bool, display: Display, lease: Lease, book: RunLedger, rehearsal: Rehearsal
    ) -> dict[str, Any]:
        """Train on the Ray that this process is connected to; with `local`, this process has started it."""
        run = self.folder
        resources = preflight.check_cluster(job.config, local, lambda line: display.say(job.config.as_typed(line)))
        job = _for_gpus(job, self.sources, resources.get("GPU", 0.0))
        preflight.check_job_can_be_sent(job, display.say)
        start_ahead(job.config, resources)
        with (
            monitoring(run_log.attempt_names(run), invalidated_states.read(run), book.clock) as monitor,
            self._fed(job) as sources,
            arbitrating(job.config, resources.get("GPU", 0.0), job.plan.shards) as arbiter,
        ):
            job = dataclasses.replace(
                job, sources=ray.put(sources), monitor=monitor, lease=lease.owner["id"], arbiter=arbiter
            )
            reader = MonitorReader(monitor, book)

            def leave(why: str) -> None:
                with contextlib.suppress(ray.exceptions.RayError):
                    reader.read(1)  # the messages since the last read, such as the one about the save
                book.note(Driver("ended", outcome="stopped", why=why))
                book.flush()
                lease.release()

            with (
                listening(reader, display, self.status_file, lease),
                exported(job.config.run.name, monitor, book),
                saving_first(monitor, display.say, leave),
                ray_watch.farewell(lambda loss: saved_before(monitor, loss, leave)),
            ):
                own = has_own_environment(ray.get_runtime_context().runtime_env, os.environ)
                poll = partial(rehearsal.poll, display.say_early, "GPU" in resources or own, local)
                document = _attempt(job, run, resources, display.say, poll)
        if document is None:
            raise RaytfError(f"training ended without a result; {program.from_last_checkpoint()}.")
        check_owner(run, lease.owner["id"])
        memory_keeper.dismiss(run.uri)
        return document

    @contextlib.contextmanager
    def _fed(self, job: TrainingJob) -> Iterator[Sources]:
        """Make batches inside the `with` statement, if the program makes them during training. Yields the sources."""
        if self.stream is None or not isinstance(self.sources.train, LiveBatches):
            yield self.sources
            return
        assert isinstance(job.plan, BatchPlan)
        with feeding(self.stream, job.plan, job.total_steps) as fetch:
            yield dataclasses.replace(self.sources, train=self.sources.train.fed(fetch))


def _attempt(
    job: TrainingJob,
    run: Storage,
    resources: dict[str, float],
    say: Callable[[str], None],
    poll: Callable[[], None],
) -> dict[str, Any] | None:
    """Train with parameter servers or Ray Train, as the strategy requires; errors are worded for the user."""
    try:
        if job.config.strategy.has_servers:
            from raytf.driver.supervision.diagnosis import until_done
            from raytf.parameter_server.group import run_group

            train, errors = partial(run_group, job, "GPU" in resources, say), (RaytfError, ray.exceptions.RayError)
            return until_done(train, errors, job.monitor, job.config.cluster.max_failures, say)
        from raytf.driver.ray_train import run as controllers

        return controllers.run(job, run, resources, poll)
    except ray.exceptions.RayError as error:
        text = f"Ray failed: {one_line(error, 400)}; {program.from_last_checkpoint()}."
        raise ClusterError(text, passes=True) from None


def _for_gpus(job: TrainingJob, sources: Sources, gpus: float) -> TrainingJob:
    """Return the job, with fewer logical shards if it is a new run on GPUs and the user set no number of them."""
    config = job.config
    if not gpus or config.batch.logical_shards is not None or config.strategy.has_servers:
        return job
    config = config.replace(logical_shards=config.shards_on_gpus(gpus))
    config.check()
    plan = plan_of(sources.train, config.batch.global_batch_size, config.logical_shards)
    job = dataclasses.replace(job, config=config, plan=plan)
    return dataclasses.replace(job, identity=run_identity.of_run(job, sources))
