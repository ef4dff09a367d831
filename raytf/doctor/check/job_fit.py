"""Checks whether a cluster can ever supply the workers of a job."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raytf.config import setting
from raytf.config.flags import ClusterSection, RunSection, StrategySection
from raytf.config.train_config import worker_range
from raytf.doctor.finding import ConfigFinding, Path, error, warning
from raytf.errors import ConfigError

#: Folders that are local to each node; all nodes may mount any other folder.
_OWN_FOLDERS = ("~", ".", "/tmp", "/home", "/root", "/var/tmp")


@dataclass(frozen=True)
class JobNeeds:
    """The needs of a job.

    Attributes:
        least, most: bounds for the number of workers.
        cpus: CPUs per worker.
        gpu: whether each worker needs a GPU; None if workers use GPUs only where the cluster has some.
        storage: URI or folder of its runs.
        share: the share of a GPU that each worker needs, if it needs one.
        helpers: processes that need one CPU each beside the workers: parameter servers and their coordinator.
        tpu: whether its workers use TPUs.
    """

    least: int
    most: int
    cpus: float
    gpu: bool | None
    storage: str
    helpers: int = 0
    share: float = 1.0
    tpu: bool = False


@dataclass(frozen=True)
class NodeSupply:
    """Nodes of one kind: their highest number, and the resources of each."""

    name: str
    nodes: int
    cpus: float
    gpus: float
    path: Path = ()
    tpus: float = 0


def parse(command: str) -> JobNeeds:
    """Return the needs of a job from its command, such as `python jobs/mnist.py --workers 1:8`.

    Raises:
        ConfigError: a flag has a value that raytf refuses.
    """
    try:
        words = shlex.split(command)
    except ValueError as problem:
        raise ConfigError(f"--job {command!r}: {problem}. Expected a command, quoted as for a shell.") from None
    cluster, run = ClusterSection(), RunSection()
    devices = _flag(words, "--logical-devices")
    if devices is not None and not devices.isdigit():
        raise ConfigError(f"--job: --logical-devices {devices}: expected a number.")
    servers = _flag(words, "--ps")
    if servers is not None and not (servers.isdigit() and int(servers)):
        raise ConfigError(f"--job: --ps {servers}: expected a number, 1 or more.")
    # A job with --ps and no --strategy has parameter servers as its default, like jobs/linear_regression.py.
    default = StrategySection().strategy if servers is None else "parameter-server"
    strategy: Any = _flag(words, "--strategy") or default
    way = StrategySection(
        strategy,
        logical_devices=None if devices is None else int(devices),
        ps=None if servers is None else int(servers),
    )
    setting.check(way)
    least, most = worker_range(way, ClusterSection(workers=_flag(words, "--workers")))
    cpus = _flag(words, "--cpus-per-worker")
    gpu: bool | None = None
    tpu = strategy == "tpu"
    if "--no-use-gpu" in words or _flag(words, "--use-gpu") == "False":
        gpu = False
    elif "--use-gpu" in words:
        gpu = True
    if way.logical_devices is not None or tpu:
        gpu = False  # logical devices are CPUs, and the number of TPUs is not checked here
    try:
        each = float(cpus or cluster.cpus) * (way.logical_devices or 1)
        share = float(_flag(words, "--gpus-per-worker") or cluster.gpus_per_worker)
        return JobNeeds(least, most, each, gpu, _flag(words, "--storage") or run.storage, way.helpers, share, tpu)
    except ValueError:
        raise ConfigError("--job: --cpus-per-worker and --gpus-per-worker: expected numbers.") from None


def _flag(words: Sequence[str], name: str) -> str | None:
    for i, word in enumerate(words):
        for form in (name, name.replace("-", "_").replace("__", "--", 1)):
            if word == form and i + 1 < len(words):
                return words[i + 1]
            if word.startswith(f"{form}="):
                return word.partition("=")[2]
    return None


def check(
    need: JobNeeds, rooms: Sequence[NodeSupply], where: Path, most_nodes: int | None = None
) -> Iterator[ConfigFinding]:
    """Compare the needs of a job with the largest size of a cluster.

    Args:
        need: the job's needs.
        rooms: the kinds of nodes, including the head.
        where: the path in the document that limits the cluster's size.
        most_nodes: the most worker nodes of all kinds together, or None for no limit.
    """
    yield from _unused_tpus(need, rooms, where)
    gpus = any(room.gpus for room in rooms)
    gpu = need.gpu if need.gpu is not None else gpus
    if gpu and not gpus:
        what, why = "the job needs a GPU for each worker, and no node has one", "It waits forever for a GPU."
        yield error("job-no-gpu", where, what, why, "Add a type with GPUs, or pass --no-use-gpu to the job.")
        return
    fits = {room.name: _workers(room, need, gpu) for room in rooms}
    if not any(fits.values()):
        what = f"no node has the {need.cpus:g} CPUs{' and a GPU' if gpu else ''} of one worker"
        fix = "Pass a smaller --cpus-per-worker, or use larger machines."
        yield error("job-does-not-fit", where, what, "The job waits forever.", fix)
        return
    reach = _reach(rooms, fits, most_nodes, need)
    beside = f", beside {need.helpers} CPUs for parameter servers and their coordinator" if need.helpers else ""
    if reach < need.least:
        what = f"the job needs at least {need.least} workers{beside}, but this cluster has room for {reach or 'none'}"
        fix = f"{f'Pass --workers 1:{reach}' if reach else 'Take larger machines'}, or raise max_workers."
        yield error("job-never-starts", where, what, "The job waits forever.", fix)
        if not reach:
            return
    elif reach < need.most:
        what = f"the job can use {need.most} workers{beside}, but this cluster has room for {reach}"
        fix = f"Pass --workers {need.least}:{reach}, or raise max_workers."
        yield warning("job-never-full", where, what, "It trains with fewer workers than it could use.", fix)
    if need.storage.startswith(_OWN_FOLDERS) and sum(room.nodes for room in rooms) > 1:
        what = f"--storage {need.storage} is a folder of one node"
        why = "Other nodes cannot read it, and it disappears with the head: checkpoints are lost."
        fix = "Pass --storage s3://BUCKET/runs (or gs://, az://), or a folder that all nodes mount."
        yield error("job-storage", where, what, why, fix)


def _unused_tpus(need: JobNeeds, rooms: Sequence[NodeSupply], where: Path) -> Iterator[ConfigFinding]:
    """Find a job that does not ask for the TPUs that all workers of the cluster have."""
    workers = [room for room in rooms if room.name != "head"]
    if workers and all(room.tpus for room in workers) and not need.tpu and need.gpu is not True:
        what = "all worker nodes have TPUs, and the job does not pass --strategy tpu"
        why = "It trains on the CPUs of these nodes, and you pay for TPUs that it does not use."
        fix = "Pass --strategy tpu to the job, or use machines without TPUs."
        yield warning("job-no-tpu", where, what, why, fix)


def _workers(room: NodeSupply, need: JobNeeds, gpu: bool) -> int:
    if not (math.isfinite(room.cpus) and math.isfinite(room.gpus) and need.cpus > 0 and 0 < need.share <= 1):
        return 0
    by_cpu = int(room.cpus / need.cpus + 1e-9)
    return min(by_cpu, int(room.gpus) * int(1 / need.share + 1e-9)) if gpu else by_cpu


def _reach(rooms: Sequence[NodeSupply], fits: dict[str, int], most_nodes: int | None, need: JobNeeds) -> int:
    """Return the most workers that fit, filling the roomiest nodes first."""
    left, total, spare = most_nodes, 0, 0
    for room in sorted(rooms, key=lambda r: -fits[r.name]):
        count = room.nodes if left is None else min(room.nodes, left)
        if room.name == "head":  # the limit is for workers
            count = 1
        elif left is not None:
            left -= count
        total += count * fits[room.name]
        if math.isfinite(room.cpus):
            spare += count * max(0, int(room.cpus - need.cpus * fits[room.name] + 1e-9))
    # The remaining helpers displace workers: each displaces one or more, or several share the CPUs of one.
    missing = max(0, need.helpers - spare)
    fewer = math.ceil(missing / int(need.cpus)) if need.cpus >= 1 else missing * math.ceil(1 / need.cpus)
    return max(0, total - fewer)
