"""Checks that the driver makes within seconds, before any worker starts."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

import ray

from raytf._ray import state
from raytf.checkpoint import manifest
from raytf.checkpoint.manifest import CheckpointDocument
from raytf.cluster import autoscaler_limits
from raytf.cluster.autoscaler_limits import Growth
from raytf.config import precision, resources
from raytf.config.flags import ALL_DEVICES, NCCL_WITHOUT_GPU, ONE_WORKER
from raytf.config.identity import OF_STRATEGY, batch_identity, beside, differences, strategy_identity
from raytf.config.objective import MetricObjective
from raytf.config.precision import DEFAULT, Precision
from raytf.config.resources import fitting, possible_workers
from raytf.config.train_config import TrainConfig
from raytf.distributed.gpu import kinds
from raytf.driver.tracking import trackers
from raytf.errors import (
    CheckpointError,
    ClusterError,
    ConfigError,
    DamagedFileError,
    DataError,
    ModelError,
    RunMismatchError,
    one_line,
)
from raytf.runs import run_folder, run_log
from raytf.storage.storage import Storage
from raytf.training.job import TrainingJob, is_function
from raytf.training.user import user_code

#: Seconds that a growing cluster may take to show the workers' resources.
_SETTLE_SECONDS = 10.0
#: The least memory that one worker with TensorFlow uses, in bytes.
_WORKER_BYTES = 700 << 20
#: Most digits of a stored --logical-shards.
_SHARDS_DIGITS = 9
#: Keys that `result.json` must contain.
_OF_RESULT = ("metrics", "weights_sha256")
_NOTHING_ELSE = (
    "It records whether the run has finished, and there is no checkpoint to rebuild it from. Restore the file, "
    "delete it to start over, or choose another --run name."
)
#: Folders that callbacks write to.
_OF_CALLBACKS = ("files", "tensorboard")
_MOVE = "Choose a --storage that has room for the run, or link the run's folder as a whole."
_REMOVE = "Remove it, or choose another --run name."
#: A head that started less than this many seconds ago may not have its nodes back yet.
_YOUNG_SECONDS = 30.0


def finished(
    run: Storage, total_steps: int, say: Callable[[str], None] = lambda message: None
) -> dict[str, Any] | None:
    """Return the result of a run that has nothing left to do, or None.

    An unreadable result is rebuilt from the newest checkpoint; without a checkpoint, it is an error.
    """
    try:
        result = run_log.read_result(run)
        missing = [] if result is None else [part for part in _OF_RESULT if part not in result]
        if missing:
            raise DamagedFileError(run.locate(run_log.RESULT), f"it has no {missing[0]!r}")
    except DamagedFileError as error:
        if not manifest.list_complete(run):
            raise DamagedFileError(error.file, error.reason, _NOTHING_ELSE) from None
        say(f"{error} It is rebuilt from the newest checkpoint")
        return None
    if result is None or not (result.get("stopped_early") or result["steps"] >= total_steps):
        return None
    return result


def stored_identity(run: Storage) -> dict[str, str]:
    """Return the settings that the run in storage was made with; empty if it has no checkpoint that can be read."""
    for name in manifest.list_complete(run):
        with contextlib.suppress(CheckpointError):  # a resume then also tries the next checkpoint
            document = CheckpointDocument.parse(manifest.read(run, name)["document"])
            if "identity" not in document.missing:
                return document.identity
    return {}


def check_folder(run: Storage) -> None:
    """Refuse a run's folder in which a save or the final result would fail, or would be written to another run: it has
    a file in place of a folder or the reverse, a link that leads out of it, or a part that is not writable."""
    if not run.is_local or not os.path.isdir(run.root):
        return
    for name in run_folder.FOLDERS:
        path = os.path.join(run.root, name)
        if os.path.islink(path):
            raise DamagedFileError(path, "it is a link, but raytf writes only into a run's own folder", _MOVE)
        if os.path.lexists(path) and not os.path.isdir(path):
            raise DamagedFileError(path, "there is a file where a folder is expected", _REMOVE)
    for name in run_folder.FILES:
        path = os.path.join(run.root, name)
        if os.path.isdir(path) and not os.path.islink(path):
            raise DamagedFileError(path, "there is a folder where a file is expected", _REMOVE)
    for below in _OF_CALLBACKS:  # which may open existing files for writing
        for name, entry in run.entries(below):
            if entry.is_symlink():
                raise DamagedFileError(run.locate(f"{below}/{name}"), "it is a link", _REMOVE)
    run.preflight()
    for name in run_folder.FOLDERS:
        if os.path.isdir(os.path.join(run.root, name)):
            run.child(name).preflight()


def stored_shards(identity: dict[str, str]) -> int | None:
    """Return --logical-shards of the run in storage, by its `stored_identity`; None if it has none."""
    text = identity.get("--logical-shards")
    if text is None:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) <= _SHARDS_DIGITS):
        raise CheckpointError(
            f"the newest checkpoint was made with --logical-shards {text[:20]!r}, which is not a number: its manifest "
            "was not written by raytf. Choose another --run name to start over."
        )
    return int(text)


def compare_strategy(before: dict[str, str], config: TrainConfig) -> None:
    """Refuse to resume a run with parameter servers if it had none, or the reverse, or asynchronously if its gradients
    were aggregated. Synchronous strategies learn the same and may replace each other."""
    now = strategy_identity(config)
    was = {key: before[key] for key in OF_STRATEGY if key in before}
    if not before or was == now:
        return
    raise RunMismatchError(
        f"run {config.run_name!r} in storage was made with {_named(was)}, but this command has {_named(now)}. They "
        "learn differently, so one cannot continue the other's steps. Use the same strategy. " + beside(config)
    )


def _named(identity: dict[str, str]) -> str:
    if not identity:
        return "a synchronous strategy"
    more = " --sync-replicas" if identity.get("--sync-replicas") == "True" else ""
    return f"--strategy {identity['--strategy']}{more}"


def compare_batch(before: dict[str, str], config: TrainConfig, records: int, precision: Precision = DEFAULT) -> None:
    """Refuse a changed batch, number of records or precision; the workers compare the model."""
    if not before:
        return
    now = batch_identity(config, records, precision)
    difference = differences({k: before.get(k, "nothing") for k in now}, now)
    if difference:
        raise RunMismatchError(
            f"run {config.run_name!r} in storage was made with other settings: {difference}. "
            f"Use the same settings as before. {beside(config)}"
        )


def cpus_here(config: TrainConfig) -> float:
    """Return the CPUs for a Ray that is started on this machine for a run.

    A laptop may run more workers than it has cores, more slowly, but not more than fit into its memory.
    """
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    fits = max(1, total // _WORKER_BYTES - config.strategy.helpers)
    wanted, most = config.worker_range
    if wanted > fits:
        raise ClusterError(
            f"--workers {config.cluster.workers or wanted}: this machine's {total / 2**30:.0f} GiB of memory hold "
            f"about {fits} workers of at least {_WORKER_BYTES / 2**30:.1f} GiB. Use --workers {fits} or fewer, "
            "or a cluster."
        )
    return resources.cpus(config.strategy, config.cluster, min(fits, most))


def check_cluster(config: TrainConfig, local: bool, say: Callable[[str], None]) -> dict[str, float]:
    """Return the resources of each worker, such as {"CPU": 1.0}; refuse what the cluster can never provide.

    Args:
        local: whether Ray was started on this machine for the run.
        say: called with lines for the user.
    """
    have, most, is_known = _when_settled(config, local)
    strategy, cluster = config.strategy, config.cluster

    def best(kind: str) -> float:
        return max(have.get(kind, 0), most.get(kind, 0) if most else 0)

    if strategy.strategy == "tpu" and not best("TPU"):
        raise ConfigError(
            "--strategy tpu: no node of this cluster has a TPU (Ray's resource `TPU`). Run on a TPU VM, add a node "
            "that has one, or use another --strategy."
        )
    gpus = best("GPU")
    use_gpu = not strategy.is_without_gpus and (cluster.use_gpu if cluster.use_gpu is not None else gpus > 0)
    if use_gpu and not gpus and is_known:
        raise ConfigError(
            "--use-gpu: no node of this cluster has a GPU, and none can be added. Add a GPU node type, or use "
            "--no-use-gpu."
        )
    wanted, alive, helpers = config.worker_range[0], _alive(), strategy.helpers
    cpu = resources.resources(strategy, cluster, False, alive)
    need = resources.resources(strategy, cluster, use_gpu, alive)
    mixed = cluster.mixed_gpus or strategy.strategy != "multi-worker-mirrored"
    fits = _fits(need, most, helpers, mixed)
    if use_gpu and cluster.use_gpu is None and fits < wanted <= _fits(cpu, most, helpers):
        say(f"this cluster has {gpus:g} GPU, {why_on_cpus(wanted, fits, _fits(need, most, helpers), need['GPU'])}")
        use_gpu, need = False, cpu
        fits = _fits(need, most, helpers)
    if strategy.communication == "nccl" and not use_gpu:
        raise ConfigError(NCCL_WITHOUT_GPU)
    if fits < wanted and is_known:
        raise _too_small(config, need, fits, _fits(need, most, helpers))
    if fits < wanted and cluster.use_gpu is None and not use_gpu and not strategy.is_without_gpus:
        say("no node of this cluster has a GPU yet: training on CPUs; --use-gpu waits for GPUs")
    if not use_gpu and strategy.strategy in ALL_DEVICES and strategy.logical_devices is None:
        say(f"--strategy {strategy.strategy} without GPUs is one CPU device; --logical-devices N splits it into N")
    if need.get("GPU", 0) > config.logical_shards:
        say(
            f"{need['GPU']:g} GPUs and {config.logical_shards} logical shards: a GPU without a shard has nothing to "
            f"do. For a new run, --logical-shards {need['GPU']:g} uses them all"
        )
    return need


def _too_small(config: TrainConfig, need: dict[str, float], fits: int, fits_mixed: int) -> ClusterError:
    """Return the error for a cluster on which too few workers fit, of one kind of GPU or of several."""
    strategy, helpers = config.strategy, config.strategy.helpers
    each = " and ".join(f"{v:g} {k}" for k, v in need.items())
    if strategy.strategy in ONE_WORKER:
        fewer = "--logical-devices or " if strategy.logical_devices else ""
        return ClusterError(
            f"--strategy {strategy.strategy} is one worker with {each}: no node of this cluster has that. Use fewer "
            f"{fewer}--cpus-per-worker, or a larger machine."
        )
    beside = f" beside {helpers} CPUs for the parameter servers and the coordinator" if helpers else ""
    fixes = [f"--workers {fits}"] * (fits > 0) + ["--mixed-gpus"] * (fits_mixed > fits)
    fixes += ["fewer --cpus-per-worker"] + ["fewer --ps"] * (helpers > 2) + ["--no-use-gpu"] * ("GPU" in need)
    return ClusterError(
        f"--workers {config.cluster.workers or config.worker_range[0]} with {each} each: this cluster has room for "
        f"at most {fits}{beside}. Use {', '.join(fixes)}, or add nodes."
    )


def why_on_cpus(wanted: int, fits: int, of_all_kinds: int, each: float) -> str:
    """Explain why existing GPUs stay idle, and which setting would use them.

    Args:
        wanted: number of workers.
        fits, of_all_kinds: workers for which there are GPUs of one kind, and of any kind.
        each: GPUs per worker.
    """
    if of_all_kinds >= wanted:
        return (
            f"of several kinds, too few of one for {wanted} workers: training on CPUs; --mixed-gpus uses them all, "
            f"--workers {fits or 1} those of one kind"
        )
    if each <= 1:
        return f"too few for {wanted} workers: training on CPUs; --workers {fits or 1} uses it"
    return "with too few CPUs beside them: training on CPUs; fewer --cpus-per-worker use them"


def _when_settled(config: TrainConfig, local: bool) -> tuple[dict[str, float], dict[str, float] | None, bool]:
    """Wait until the cluster has enough resources or had time to settle. Return its resources, the most that an
    autoscaler may add of each (None if unknown), and whether these are the limit."""
    wanted, uses_gpu = config.worker_range[0], bool(config.cluster.use_gpu)
    need = resources.resources(config.strategy, config.cluster, uses_gpu, [])
    begin = time.monotonic()
    port = ray.get_runtime_context().gcs_address.rpartition(":")[2]
    growth = Growth.NO if local else autoscaler_limits.find(int(port))
    most = None if isinstance(growth, Growth) else growth
    while True:
        waited = time.monotonic() - begin
        is_late = waited >= max(_SETTLE_SECONDS, _YOUNG_SECONDS - _age())
        if local or most or _fits(need, None, config.strategy.helpers) >= wanted or is_late:
            return ray.cluster_resources(), most, growth is not Growth.UNKNOWN
        time.sleep(0.5)


def _age() -> float:
    """Return the seconds since the head started, by the clocks of both machines; infinity if unknown."""
    starts = state.head_starts(ray.get_runtime_context().gcs_address)
    return max(0.0, time.time() - max(starts)) if starts else float("inf")


def _fits(need: dict[str, float], most: dict[str, float] | None, helpers: int, mixed: bool = True) -> int:
    """Return how many workers fit on the nodes in addition to helpers, now or after `most` was added.

    Args:
        helpers: number of processes for parameter servers and coordinator.
        mixed: whether the workers' nodes may have GPUs of several kinds.
    """
    nodes = _alive()
    if need.get("GPU") and not mixed:
        nodes = of_one_kind(nodes, need)
    now = _room(nodes, need, helpers)
    if not most:
        return now
    heads = [node for node in nodes if "node:__internal_head__" in node]
    return max(now, _room([*heads, most], need, helpers))


def of_one_kind(nodes: list[dict[str, float]], need: dict[str, float]) -> list[dict[str, float]]:
    """Return the nodes with the kind of GPU on which the most workers fit."""
    of = {str(i): kinds.of_node({"Resources": node}) for i, node in enumerate(nodes)}
    kind = kinds.one_kind(of, lambda some: sum(fitting(nodes[int(i)], need) for i in some))
    return [node for i, node in enumerate(nodes) if of[str(i)] == kind]


def _room(nodes: list[dict[str, float]], need: dict[str, float], helpers: int) -> int:
    alone = sum(fitting(node, need) for node in nodes)
    return max(0, possible_workers(nodes, need, [resources.HELPER] * helpers, alone)) if helpers else alone


def _alive() -> list[dict[str, float]]:
    return [n["Resources"] for n in ray.nodes() if n["Alive"]]


def check_arguments(
    config: TrainConfig, own: precision.Precision, model: Any, train: Any, validation: Any, validation_freq: Any
) -> None:
    """Refuse wrong settings and arguments before anything is changed."""
    config.check()
    trackers.check(config.run.track)
    chosen = precision.choose(config.compute.mixed_precision, own)
    if config.strategy.has_servers:
        precision.check_for_servers(chosen.policy)
    if train is None:
        raise DataError("there is no training data: fit(model, x) got None.")
    is_list = isinstance(validation_freq, list)
    if not is_list and not (isinstance(validation_freq, int) and validation_freq >= 1):
        raise DataError(f"validation_freq is {validation_freq}. Expected 1 or more, or a list of epochs.")
    best = config.checkpoints.keep_best
    if validation is None and best is not None and MetricObjective.of(best).metric.startswith("val_"):
        raise ConfigError(
            f"--keep-best {best}: there is no validation data. Pass some, or choose a metric of training."
        )
    if is_function(model):
        return
    if not hasattr(model, "compile"):
        raise ModelError(
            f"fit(model, ...) got a {type(model).__name__}. Expected a compiled keras.Model, or a function without "
            "arguments that returns one."
        )
    if not getattr(model, "compiled", False):
        raise ModelError("the model is not compiled. Call model.compile(optimizer=..., loss=...) before fit.")
    if config.strategy.has_servers:
        raise ModelError(
            "--strategy parameter-server creates variables in pieces on its servers, which a ready-made model does not "
            "allow. Pass a function that returns the model, or leave the strategy out."
        )


def check_job_can_be_sent(job: TrainingJob, say: Callable[[str], None]) -> None:
    """Refuse a job that cannot be sent to workers; `say` takes a line for each object that stays in this process."""
    try:
        ray.cloudpickle.dumps(job)
    except Exception as error:
        _check_callbacks(job.code.get().callbacks)
        raise ConfigError(
            f"the job cannot be sent to the workers: {type(error).__name__}: {error}. Create what cannot be pickled "
            "(sockets, endless TensorFlow data sets) inside the model or callbacks function."
        ) from error
    for kind in job.code.left_behind:
        say(f"{kind} stays in this process: a callback or layer that uses it in a worker fails there")


def _check_callbacks(callbacks: Any) -> None:
    """Refuse callbacks that hold an object that cannot be sent, and name it in the error."""
    if not callbacks or callable(callbacks):
        return
    from raytf.training.user import object_graph  # imports TensorFlow, which the callbacks have done already

    for label, value in object_graph.leaves(callbacks):
        try:
            user_code.packed(value)
        except Exception as error:
            raise ConfigError(
                f"{label} is a {type(value).__name__}, which cannot be sent to the workers ({one_line(error, 200)}). "
                "Create it in the callback's on_train_begin, which runs on a worker."
            ) from error
