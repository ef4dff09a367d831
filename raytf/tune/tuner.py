"""A search over a job's flags: Ray Tune runs the trials, and each trial is a run of raytf.

Ray Tune decides which trial starts and, with a scheduler, which trial stops early. The search's storage keeps the state
that must outlive this process (`raytf.tune.search_record`). A repeated command reports the finished trials to Ray Tune,
epoch by epoch, and starts the other trials, whose runs continue from their checkpoints.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raytf._process import signal_handler
from raytf.config import resources
from raytf.config.command_line import DESCRIBE
from raytf.config.identity import strategy_identity
from raytf.config.objective import MetricObjective
from raytf.config.resources import placed
from raytf.config.setting import InSearch, flag
from raytf.config.train_config import TrainConfig, every_setting
from raytf.errors import ConfigError, one_line
from raytf.storage.storage import Storage
from raytf.tune import search_record
from raytf.tune.search_record import TrialOutcome, TrialRecord
from raytf.tune.space import SearchSpace, flags
from raytf.tune.table import LiveTable, TrialRow, TrialTable

#: Flags of a job that the search sets.
_OURS = [setting.name for setting in every_setting() if InSearch.OWNED in setting.in_search]
#: Flags that a job must have, so that a trial can be a run and can share the cluster with other trials.
_NEEDED = [*(setting.name for setting in every_setting() if InSearch.NEEDED in setting.in_search), *_OURS]
#: Flags that do not affect the weights that a trial learns, so a command that continues a search may change them.
#: `identity` adds back the flags of the strategy that must not change.
_FREE = {setting.name for setting in every_setting() if not setting.is_fixed_in_search}
#: Flags that set the number of workers of a trial, or the number of parts into which they split a batch.
_SIZES = {setting.name for setting in every_setting() if InSearch.SIZES in setting.in_search}
#: Environment variables that a trial's command gets from this process instead of from Ray. The last one passes the
#: files and environment variables of a submitted job to its workers.
_HANDED_ON = ("PATH", "PYTHONPATH", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "RAY_JOB_CONFIG_JSON_ENV_VAR")
_DESCRIBE_SECONDS = 60.0
#: The last epoch at which a scheduler may stop trials: more epochs than any run has.
_MOST_EPOCHS = 10**6
#: How often a trial's actor may fail, for example with its node: Ray Tune restarts it, and the run continues.
_ACTOR_FAILURES = 3


@dataclass(frozen=True)
class Search:
    """The job's file, the searched values, and how the search runs.

    Attributes:
        texts: the values of `--search`.
        trials: number of trials; None for all points of a grid, or 8 trials if values are drawn.
        fixed: flags of the job that are the same in all trials.
        scheduler: `none` or `asha`.
        parallel: how many trials run at a time; None for as many as fit into the cluster.
        try_default: whether the first trial uses the job's own defaults.
        retry_failed: whether to restart trials that failed in an earlier command.
    """

    job: str
    texts: Sequence[str]
    name: str
    storage: str
    goal: MetricObjective
    trials: int | None = None
    fixed: Sequence[str] = ()
    scheduler: str = "none"
    grace_epochs: int = 1
    reduction_factor: int = 3
    parallel: int | None = None
    seed: int = 0
    try_default: bool = False
    retry_failed: bool = False


def describe(job: str, args: Sequence[str]) -> dict[str, Any]:
    """Return the values of all flags of a job, as the job itself parses them."""
    path = Path(job)
    if not path.is_file():
        raise ConfigError(f"{job}: there is no such file. Expected a job such as jobs/mnist.py.")
    with tempfile.TemporaryDirectory(prefix="raytf-tune-") as folder:
        values_file = Path(folder) / "flags.json"
        try:
            done = subprocess.run(
                [sys.executable, job, *args],
                env={**os.environ, DESCRIBE: str(values_file), "COLUMNS": "500"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_DESCRIBE_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise ConfigError(
                f"{job} did not report its flags within {_DESCRIBE_SECONDS:.0f} s. Expected a job that ends with "
                "`raytf.cli(main)`, and does all work in `main`."
            ) from None
        if values_file.exists():
            return json.loads(values_file.read_text())
    output = one_line((done.stderr or done.stdout).translate(_NO_FRAMES), 400)
    if done.returncode == 0:
        raise ConfigError(f"{job} did not report its flags. Expected a job that ends with `raytf.cli(main)`.")
    raise ConfigError(f"{job} refuses {' '.join(args) or 'to start'}: {output}")


_NO_FRAMES = dict.fromkeys(map(ord, "╭╮╰╯│─"), " ")


def run(search: Search, say_first: Callable[[str], None] = print) -> tuple[TrialTable, TrialRecord | None, Storage]:
    """Run the search until it is complete, and return the table of trials, the best trial, and the storage of its copy.

    Raises:
        KeyboardInterrupt: a signal stopped the search; all trials have saved.
    """
    from raytf.runs.lease import Lease

    space = SearchSpace(search.texts)
    trials = _count(search, space)
    points: list[dict[str, Any]] = [{}] if search.try_default else []
    points += [space.point(search.seed, index) for index in range(trials - len(points))]
    for name in _OURS:
        if name in space.names or any(f.split("=")[0].replace("_", "-") == flag(name) for f in search.fixed):
            raise ConfigError(
                f"{flag(name)} belongs to the search, which sets it for every trial. Pass --name and --storage to "
                "`raytf tune` instead."
            )
    first = points[-1]  # this trial has values of all searched flags; the first one may have none
    values = describe(search.job, [*search.fixed, *flags(first)])
    own = describe(search.job, search.fixed) if search.try_default else {}
    lacking = [name for name in _NEEDED if name not in values]
    if lacking:
        raise ConfigError(
            f"{search.job}: the job has no flag {flag(lacking[0])}. Its dataclass needs `train: raytf.Flags`, and "
            "`raytf.fit` needs that field as its config."
        )
    config = largest({**values, **own}, points)
    storage = Storage(TrainConfig.of(storage=search.storage).storage_uri)
    storage.preflight()
    folder = storage.child(search.name)
    say_first(f"search {search.name} in {folder.locate('')}: {trials} trials of {search.job}")
    with Lease(folder.child(search_record.SEARCH), say_first):
        search_record.keep_identity(folder, identity(search, space, values), search.name)
        over = search_record.read(folder)
        if search.retry_failed:
            for number in [n for n, record in over.items() if record.outcome is TrialOutcome.FAILED]:
                search_record.forget(folder, number)
                del over[number]
        defaults = {name: own.get(name) for name in space.names}
        board = TrialTable(space.names, search.goal, [TrialRow(point or defaults) for point in points])
        over = {number: record for number, record in over.items() if number < trials}
        for record in over.values():
            board.settle(record)
        if over:
            say_first(f"{len(over)} of {trials} trials have ended already")
        if len(over) < trials:
            with _cluster(config, search.parallel) as (address, nodes, worker):
                part = share(config, nodes, worker, trials, search.parallel, space.names)
                _search(search, folder, points, over, board, part, address)
        records = {n: r for n, r in search_record.read(folder).items() if n < trials}
        chosen = search_record.best(records, search.goal)
        copy = folder.child(search_record.BEST_TRIAL)
        if chosen is not None:
            copy = search_record.keep_best(folder, chosen, search.goal)
    return board, chosen, copy


def _count(search: Search, space: SearchSpace) -> int:
    most = None if space.grid_points is None else space.grid_points + search.try_default
    if search.trials is None:
        return 8 if most is None else most
    if most is not None and search.trials > most:
        raise ConfigError(
            f"--trials {search.trials}: the grid has {most} points. Pass --trials {most}, or leave it out."
        )
    return search.trials


def identity(search: Search, space: SearchSpace, values: dict[str, Any]) -> dict[str, str]:
    """Return the settings that must stay the same to continue a search, from the values of all flags of the job."""
    kept = {flag(name): str(value) for name, value in values.items() if name not in _FREE}
    kept |= strategy_identity(TrainConfig.among(values))
    for name in space.names:
        kept.pop(flag(name), None)
    scheduler = search.scheduler
    if scheduler != "none":
        scheduler += f" with --grace-epochs {search.grace_epochs} --reduction-factor {search.reduction_factor}"
    return {
        **kept,
        "job": Path(search.job).name,
        "--search": json.dumps(space.describe(), sort_keys=True),
        "--metric": f"{'max' if search.goal.is_largest else 'min'}:{search.goal.metric}",
        "--scheduler": scheduler,
        "--tune-seed": str(search.seed),
        "--try-default": str(search.try_default),
    }


@contextmanager
def _cluster(
    config: TrainConfig, parallel: int | None
) -> Iterator[tuple[str, list[dict[str, float]], dict[str, float]]]:
    """Connect to Ray, or start it here, and yield its address, the resources of its nodes, and those of one worker."""
    # raytf has its own messages and files, so turn off those of Ray Tune, and its checks of metrics.
    for name, value in {
        # The actors of trials reserve no CPU. A Ray started here would warn about eight of them on two cores.
        "RAY_worker_maximum_startup_concurrency": str(max(4, os.cpu_count() or 1)),
        "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
        "TUNE_DISABLE_STRICT_METRIC_CHECKING": "1",
        "TUNE_DISABLE_SIGINT_HANDLER": "1",
        "TUNE_WARN_EXCESSIVE_EXPERIMENT_CHECKPOINT_SYNC_THRESHOLD_S": "0",
        "RAY_AIR_NEW_OUTPUT": "0",
        "RAY_CHDIR_TO_TRIAL_DIR": "0",
    }.items():
        os.environ.setdefault(name, value)
    import ray

    from raytf.cluster.connect import ray_for
    from raytf.driver import preflight

    def cpus() -> float:
        fewest = resources.cpus(config.strategy, config.cluster, config.worker_range[0])
        return max(preflight.cpus_here(config), fewest * (parallel or 1))

    with ray_for(cpus, verbose=False):
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        has_gpu = any(node.get("GPU", 0) for node in nodes)
        use_gpu = has_gpu and config.cluster.use_gpu is not False and not config.strategy.is_without_gpus
        yield (
            ray.get_runtime_context().gcs_address,
            nodes,
            resources.resources(config.strategy, config.cluster, use_gpu, nodes),
        )


def _search(
    search: Search,
    folder: Storage,
    points: list[dict[str, Any]],
    over: dict[int, TrialRecord],
    board: TrialTable,
    part: TrialResources,
    address: str,
) -> None:
    import ray
    from ray import tune

    from raytf.tune.trial import EventStopper, SearchPlan, TrialRun, Watcher

    plan = SearchPlan(
        command=[sys.executable, os.path.abspath(search.job), *search.fixed, *part.flags],
        folder=os.getcwd(),
        points=[flags(point) for point in points],
        uri=folder.uri,
        goal=search.goal,
        address=address,
        environment={k: v for k, v in os.environ.items() if k in _HANDED_ON or k.startswith("RAY_TRAIN_")},
        over=over,
    )
    here = {f"node:{ray.util.get_node_ip_address()}": 0.001}
    trainable = tune.with_resources(tune.with_parameters(TrialRun, plan=plan), tune.PlacementGroupFactory([here]))
    stop = threading.Event()
    with (
        LiveTable(board) as view,
        tempfile.TemporaryDirectory(prefix="raytf-tune-") as scratch,
        _signals(stop, view.say),
    ):
        tuner = tune.Tuner(
            trainable,
            param_space={"trial": tune.grid_search(list(range(len(points))))},
            tune_config=tune.TuneConfig(scheduler=_scheduler(search), max_concurrent_trials=part.parallel),
            run_config=tune.RunConfig(
                name="search",
                storage_path=scratch,
                verbose=0,
                stop=EventStopper(stop),
                failure_config=tune.FailureConfig(max_failures=_ACTOR_FAILURES),
                checkpoint_config=tune.CheckpointConfig(checkpoint_at_end=False),
                callbacks=[Watcher(folder, points, over, board, view, stop)],
            ),
        )
        tuner.fit()
    if stop.is_set():
        raise KeyboardInterrupt


def _scheduler(search: Search) -> Any:
    from ray import tune

    if search.scheduler == "none":
        return tune.schedulers.FIFOScheduler()
    return tune.schedulers.ASHAScheduler(
        time_attr="epoch",
        metric="score",
        mode="max" if search.goal.is_largest else "min",
        max_t=_MOST_EPOCHS,
        grace_period=search.grace_epochs,
        reduction_factor=search.reduction_factor,
    )


@contextmanager
def _signals(stop: threading.Event, say: Callable[[str], None]) -> Iterator[None]:
    """Set `stop` at the first Ctrl-C or SIGTERM, so that the trials save, and exit at the second one."""

    def tell(number: int, frame: Any) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()
        say("stopping: the trials save first")

    with signal_handler(tell):
        yield


# -- how trials share a cluster ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrialResources:
    """The number of trials that run at a time, and the flags that make them fit into the cluster together."""

    parallel: int
    flags: list[str] = field(default_factory=list)


def largest(values: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> TrainConfig:
    """Return the configuration of the trial that takes the most CPUs.

    Args:
        values: values of all flags of the job.
        points: values of the searched flags, by trial.

    Raises:
        ConfigError: no trial has a valid configuration.
    """
    configs: list[tuple[float, TrainConfig]] = []
    refused = ConfigError("there is no trial.")
    for point in points:
        try:
            config = TrainConfig.among({**values, **point})
            config.cluster.check()
            configs.append((resources.cpus(config.strategy, config.cluster, config.worker_range[1]), config))
        except ConfigError as error:
            refused = error  # other trials may be valid; this one reports the error when it runs
        except TypeError:
            continue  # a word for a flag that takes a number, which the trial reports, too
    if not configs:
        raise refused
    return max(configs, key=lambda pair: pair[0])[1]


def share(
    config: TrainConfig,
    nodes: Sequence[Mapping[str, float]],
    worker: Mapping[str, float],
    trials: int,
    parallel: int | None,
    searched: Sequence[str],
) -> TrialResources:
    """Decide how many trials share the cluster at a time, and how many workers each trial has.

    By default, each trial has its maximum number of workers, and as many trials run as fit. With a higher `parallel`,
    each trial gets a part of the cluster, but never fewer workers than its minimum. It keeps the number of logical
    shards of its maximum, so it learns the same weights.

    Args:
        config: configuration of the trial that takes the most CPUs.
        nodes, worker: resources of each living node, and of one worker.
        trials: number of trials.
        parallel: how many trials run at a time; None for as many as fit.
        searched: names of the searched flags.
    """
    low, high = config.worker_range

    def fit(workers: int, most: int) -> int:
        needs, left = [worker] * workers + [resources.HELPER] * config.strategy.helpers, list(nodes)
        for count in range(most):
            after = placed(left, needs)
            if after is None:
                return count
            left = after
        return most

    count = min(trials, parallel) if parallel is not None else max(1, fit(high, trials))
    # A step cannot aggregate the gradients of more replicas than there are workers.
    least = max(low, config.strategy.replicas_to_aggregate or low)
    part = next((workers for workers in range(high, least, -1) if fit(workers, count) == count), least)
    if part == high or _SIZES & set(searched):
        return TrialResources(count)
    return TrialResources(count, [f"--workers={low}:{part}", f"--logical-shards={config.logical_shards}"])
