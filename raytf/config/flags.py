"""The settings of a run: each field is a flag, its docstring the help text, and each class a section of `--help`.

Everything else about a setting is in its field's `Annotated`, as classes of `raytf.config.setting`.
"""

from __future__ import annotations

import os
import urllib.parse
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import tyro
from annotated_types import Ge, Gt, Interval, Le, Lt

from raytf.config import setting
from raytf.config.setting import AlsoTakes, Expected, Identity, InSearch, Refused, Usual, When
from raytf.errors import ConfigError

Strategy = Literal["multi-worker-mirrored", "mirrored", "one-device", "central-storage", "parameter-server", "tpu"]
MixedPrecision = Literal["off", "bfloat16", "float16"]
Pipeline = Literal["auto", "record", "live"]
Reduction = Literal["fixed", "float"]
Notices = Literal["auto", "aws", "gcp", "azure", "off"]
RateScaling = Literal["none", "linear", "sqrt"]
Communication = Literal["auto", "ring", "nccl", "host"]
Place = Annotated[str, AlsoTakes(os.PathLike)]
WorkerRange = Annotated[str | None, tyro.conf.arg(metavar="N|MIN:MAX"), AlsoTakes(int)]

#: The smallest part of a GPU that Ray can assign.
LEAST_GPU = 1e-4
DEFAULT_WORKERS = "2"
#: Strategies of one process: one worker, whose devices share the work.
ONE_WORKER = ("mirrored", "one-device", "central-storage", "tpu")
#: Strategies that use all GPUs of their machine, or logical CPU devices instead.
ALL_DEVICES = ("mirrored", "central-storage")
#: Strategies whose workers sum gradients over the network.
OVER_THE_NETWORK = ("multi-worker-mirrored",)
#: Strategies whose weights are on servers.
SERVERS = ("parameter-server",)


def _all_but(*names: str) -> tuple[str, ...]:
    return tuple(name for name in get_args(Strategy) if name not in names)


def not_with_servers(
    why: str, start: str = "{flag}", unless: tuple[object, ...] = (), sync_replicas: bool | None = None
) -> Refused:
    """Return the refusal of a setting that parameter servers ignore or cannot use."""
    message = f"{start} with --strategy {{strategy}}: {why}. Leave it out."
    return Refused(SERVERS, message, unless, sync_replicas)


#: The refusal of a setting of parameter servers.
OF_SERVERS = Refused(
    _all_but(*SERVERS),
    "{flag} is only for parameter servers, but --strategy is {strategy}. Pass --strategy parameter-server, or leave "
    "out {flag}.",
)
#: The beginning of the message about a setting of devices.
ONLY_DEVICES = (
    f"{{typed}} with --strategy {{strategy}}: only {' and '.join(ALL_DEVICES)} share the work among devices of one "
    "machine. "
)
#: The message about --communication nccl with workers that have no GPU.
NCCL_WITHOUT_GPU = (
    "--communication nccl: NCCL sums gradients between GPUs, and the workers have none. Leave it out, or pass "
    "--communication host."
)


@dataclass(frozen=True)
class RunSection:
    """The run, and where it is stored."""

    run: Annotated[str | None, InSearch.OWNED, Usual()] = None
    """Name of the run; the same name on the same storage continues where that run stopped. Default: the name of the
    program, such as mnist for jobs/mnist.py, or of the notebook's file. Without such a name, it is notebook in a
    notebook and run elsewhere."""
    new: Annotated[bool, InSearch.OWNED, Usual()] = False
    """Start another run beside the existing runs of that name: mnist-2, mnist-3 and so on. To continue it later, pass
    its name as --run instead."""
    storage: Annotated[Place, InSearch.OWNED, Usual()] = "~/raytf-runs"
    """Where runs are kept: a folder, s3://BUCKET/PREFIX, gs://BUCKET/PREFIX or az://CONTAINER/PREFIX."""
    status_file: Annotated[str | None, AlsoTakes(os.PathLike), InSearch.OWNED] = None
    """Write the latest status as JSON to this local file, for scripts that watch the run."""
    histograms_every: Annotated[int, Ge(0)] = 0
    """Number of steps between two histograms of gradients and weights for TensorBoard, which also gets the model's
    graph; 0 turns this off."""
    track: Annotated[str | None, tyro.conf.arg(metavar="mlflow|wandb|tensorboard|FILE.jsonl"), Usual()] = None
    """Report the run to an experiment tracker: settings, metrics of each step and epoch, the report and the model. All
    starts of the run are one run of the tracker. A FILE receives one line of JSON for each step."""
    verbose: Annotated[bool, Usual()] = False
    """Show the messages of TensorFlow and Ray, too."""

    @property
    def name(self) -> str:
        """The run's name, once `fit` has chosen it."""
        assert self.run is not None
        return self.run


@dataclass(frozen=True)
class WorkerSection:
    """The number of workers, and the resources of each."""

    workers: Annotated[WorkerRange, InSearch.SIZES, InSearch.NEEDED, Usual()] = None
    """Number of workers, or the fewest and the most, such as 1:8. Default: 2, or 1 with a --strategy that has exactly
    one worker."""
    use_gpu: Annotated[
        bool | None,
        Usual(),
        Refused(
            ("tpu",),
            "{flag} with --strategy {strategy}: a worker computes on one kind of device. Pass one of them.",
            unless=(False,),
        ),
    ] = None
    """Compute on GPUs, one for each worker unless --gpus-per-worker is less. Default: on if the cluster has a GPU."""
    # Part of the identity: the number of threads decides where TensorFlow splits a sum.
    cpus_per_worker: Annotated[
        float | None,
        Gt(0),
        Lt(float("inf")),
        Identity(When.EXACT, text="{cpus_per_worker:g}"),
        InSearch.NEEDED,
    ] = None
    """CPUs and TensorFlow threads of each worker. Default: 1 of each; a worker on a GPU has as many threads as its node
    has CPUs for each GPU, or 1 with --exact. Another number can change the last bit of a sum."""
    gpus_per_worker: Annotated[
        float,
        Interval(ge=LEAST_GPU, le=1),
        Expected("a number above 0 and at most 1. For more GPUs, use more --workers"),
        Refused(
            ALL_DEVICES,
            "{typed} with --strategy {strategy}: its one worker uses all GPUs of its machine. Leave it out, or pass "
            "--strategy multi-worker-mirrored.",
        ),
    ] = 1.0
    """GPUs of each worker that computes on GPUs: 1, or a fraction, such as 0.5 for two workers on one GPU."""

    @property
    def cpus(self) -> float:
        """CPUs that each worker requests from Ray."""
        return 1.0 if self.cpus_per_worker is None else self.cpus_per_worker

    @property
    def worker_range(self) -> tuple[int, int]:
        """The fewest and the most workers."""
        low, colon, high = str(DEFAULT_WORKERS if self.workers is None else self.workers).partition(":")
        try:
            bounds = int(low), int(high if colon else low)
        except ValueError:
            bounds = (0, 0)
        if not 1 <= bounds[0] <= bounds[1]:
            raise ConfigError(
                f"--workers {self.workers}: expected a number such as 2, or the fewest and the most such as 1:4 "
                "(both at least 1)."
            )
        return bounds

    def check(self) -> None:
        """Refuse values that cannot work, with a ConfigError."""
        _ = self.worker_range
        setting.check(self)


@dataclass(frozen=True)
class ClusterSection(WorkerSection):
    """How the run uses the cluster."""

    resize_every_seconds: Annotated[
        float,
        Ge(0),
        not_with_servers("the number of workers changes only when the group starts again"),
    ] = 60.0
    """Minimum seconds between two changes of the number of workers when nodes join or leave with notice."""
    max_failures: Annotated[int, Ge(-1)] = -1
    """How often lost workers are replaced before the run gives up; -1 never gives up. Five storage errors in a row
    without a new step stop the run in any case."""

    hang_seconds: Annotated[float, Ge(0)] = 30.0
    """A worker counts as hung after this many seconds without progress, or after the time of 20 steps if that is more.
    Callbacks, saves, validation, compiling and restoring may take 10 or 20 times as long. 0 turns this check off."""
    replace_stragglers: Annotated[
        bool,
        not_with_servers(
            "no worker waits for a slow worker; with --sync-replicas, --replicas-to-aggregate adds backups"
        ),
    ] = False
    """Move a worker that stays slower than its peers to another node, if the cluster has one."""
    mixed_gpus: bool = False
    """Allow GPUs of several kinds in one group of workers. By default all workers of a group use the kind of GPU on
    which most workers can run, because the last bits of a result differ between kinds."""
    warm_workers: bool = True
    """Keep a process with TensorFlow imported ready on each node for each worker (about 0.7 GB each), which halves the
    time to replace a lost worker. A node that would have less than 2 GiB of free memory left keeps none."""


@dataclass(frozen=True)
class NoticeSection:
    """The preemption notices that each node watches for."""

    notices: Notices = "auto"
    """The cloud whose metadata service each node polls. auto detects the cloud, and detects none on a laptop."""
    notice_url: str | None = None
    """Base URL of the metadata service if it is not the cloud's own; {node_id} stands for Ray's ID of the node."""
    follow_warnings: bool = False
    """Also leave a node on a warning: a rebalance recommendation of AWS, or a move or pause without a restart. Without
    this flag, warnings are only shown."""

    def check(self) -> None:
        """Refuse values that cannot work, with a ConfigError."""
        setting.check(self)
        if self.notice_url is None:
            return
        try:
            url = urllib.parse.urlsplit(self.notice_url)
            fits = url.scheme == "http" and url.hostname and url.port != 0 and not (url.query or url.fragment)
        except ValueError:
            fits = False
        if not fits:
            raise ConfigError(
                f"--notice-url {self.notice_url}: expected http://HOST[:PORT][/PREFIX], such as http://127.0.0.1:8000, "
                "without the path that the cloud defines."
            )


@dataclass(frozen=True)
class LengthSection:
    """The length of the run."""

    epochs: Annotated[int | None, Ge(1), InSearch.KEPT, Usual()] = None
    """Passes over the training data. Default: the number in the program, or 1 if it has none and --steps is not
    passed."""
    steps: Annotated[int | None, Ge(1), InSearch.KEPT, Usual()] = None
    """Length in global steps; pass it instead of --epochs."""


@dataclass(frozen=True)
class BatchSection:
    """The batch of a step. These settings define the run and cannot change when it is resumed."""

    global_batch_size: Annotated[int, Ge(1), Identity(), Usual()] = 128
    """Examples in one step, over all workers together."""
    logical_shards: Annotated[int | None, Ge(1), Identity(), InSearch.SIZES] = None
    """Parts of a global batch, each of which is one micro-batch of one worker. If they do not divide the batch evenly,
    some have one more example. Default: the number of the existing run; for a new run, the smallest power of two that
    is at least the maximum number of workers, and on CPUs at least 4."""
    seed: Annotated[int, Ge(0), Le(2**32 - 1), Identity(), Usual()] = 0
    """Seed of initial weights, data order, dropout and augmentation."""
    pipeline: Pipeline = "auto"
    """How to read a tf.data.Dataset, a PyDataset or a generator: record reads one pass before training and uses it for
    all epochs; live reads batches during training; auto records data that is the same in each pass."""


@dataclass(frozen=True)
class RateSection:
    """How the learning rate depends on the batch size. It does not depend on the number of workers, because the global
    batch is the same for every number."""

    scale_learning_rate: Annotated[
        RateScaling, Identity(When.CHANGED, text="{scale_learning_rate} from --base-batch-size {base_batch_size}")
    ] = "none"
    """Multiply the model's learning rate by --global-batch-size / --base-batch-size (linear), or by the square root of
    that ratio (sqrt)."""
    base_batch_size: Annotated[int, Ge(1), Identity(within="scale_learning_rate")] = 128
    """The global batch for which the model's learning rate was chosen."""
    warmup_epochs: Annotated[float, Ge(0), Lt(float("inf")), Identity(When.CHANGED, text="{warmup_epochs:g}")] = 0.0
    """Raise the learning rate linearly to its full value over this many epochs: from the model's own rate if it is
    scaled up, otherwise from 0."""


@dataclass(frozen=True)
class ComputeSection:
    """How a step is computed."""

    mixed_precision: Annotated[
        MixedPrecision | None,
        Identity(),
        Usual(),
        not_with_servers(
            "all workers would write the loss scale at the same time; bfloat16 needs no loss scale",
            start="{typed}",
            unless=("off", "bfloat16"),
        ),
    ] = None
    """Compute in 16 bits and keep variables in 32 bits, or off. Default: the dtype policy that the job set."""
    jit: Annotated[bool, InSearch.KEPT] = False
    """Compile the gradient function with XLA."""
    exact: Annotated[
        bool,
        Identity(),
        Usual(),
        not_with_servers(
            "how many updates separate a worker's read of the weights from its own update depends on timing, so no two "
            "runs are alike, and the last updates of a worker that dies may be applied twice",
            sync_replicas=False,
        ),
        not_with_servers(
            "the servers sum gradients as floats, in an order that depends on the number of parts", sync_replicas=True
        ),
    ] = False
    """Guarantee weights that are equal to the last bit for every number of workers and every failure, or refuse."""
    reduction: Annotated[Reduction, Identity()] = "fixed"
    """How gradients are summed: fixed (fixed point, the same sum in every order) or float."""
    compress_gradients: Annotated[
        bool,
        Identity(When.CHANGED),
        not_with_servers("workers send gradients to the servers, which do not decompress them"),
    ] = False
    """Send gradients in 16 instead of 32 bits, in fixed point: half the bytes, and still equal sums for every number of
    workers."""
    overlap: Annotated[
        bool,
        Refused(
            _all_but(*OVER_THE_NETWORK),
            "{flag} with --strategy {strategy}: only multi-worker-mirrored sums gradients while others are still "
            "computed. Leave out {flag}.",
        ),
    ] = False
    """Sum gradients over the workers in buckets of up to 32 MiB, while others are still being computed; the bits of the
    sums do not change."""
    steps_per_call: Annotated[
        int,
        Ge(0),
        not_with_servers("with --sync-replicas each step is a separate call", unless=(1,), sync_replicas=True),
    ] = 0
    """Steps in one call into TensorFlow; 0 chooses the number from the measured step time."""
    audit_every: Annotated[
        int | None,
        Ge(0),
        not_with_servers("the result of a worker depends on when it read the weights", unless=(0,)),
    ] = None
    """Number of steps between two audits, in which another worker recomputes one shard and compares the bits. A machine
    with wrong results is reported and excluded, and the run rolls back. 0 turns audits off. Default: 256 with --exact
    (less than 1 % of the time), otherwise 0."""
    digests: bool = True
    """Record a digest of each shard's contribution to each step, so that the step can be computed again and compared.
    Float sums have no digests."""


@dataclass(frozen=True)
class StrategySection:
    """How the work of a step is divided among devices and machines."""

    strategy: Annotated[Strategy, Identity(When.WITH_SERVERS), InSearch.SIZES] = "multi-worker-mirrored"
    """multi-worker-mirrored: one process for each worker, gradients summed over the network; mirrored: one worker with
    all GPUs of its machine; one-device; central-storage: weights in the host's memory, computation on all GPUs;
    parameter-server: weights on --ps servers, workers do not wait for each other; tpu."""
    communication: Annotated[
        Communication,
        Refused(
            _all_but(*OVER_THE_NETWORK),
            "{typed} with --strategy {strategy}: only multi-worker-mirrored sums gradients over the network. Leave out "
            "{flag}.",
        ),
    ] = "auto"
    """How multi-worker-mirrored sums gradients: ring (over gRPC), nccl (between GPUs), host (in memory within a host,
    over TCP between hosts), or auto: nccl if each worker has its own GPU, otherwise host."""
    logical_devices: Annotated[
        int | None,
        Ge(1),
        Refused(
            ("multi-worker-mirrored", "parameter-server"),
            ONLY_DEVICES + "Pass --workers for more workers, or pass --strategy mirrored.",
        ),
        Refused(("one-device", "tpu"), ONLY_DEVICES + "Leave it out, or pass --strategy mirrored."),
    ] = None
    """Use this many logical CPU devices instead of GPUs, for the one worker of mirrored or central-storage. Each device
    uses one of --cpus-per-worker."""
    show_cluster: bool = False
    """Show each process's node, devices, memory and TF_CONFIG whenever workers start."""
    log_device_placement: Annotated[
        bool,
        not_with_servers(
            "workers are TensorFlow servers, which do not report where an operation runs. Gradients are computed on "
            "the devices that --show-cluster shows, updates on the server that `placement` in result.json names"
        ),
    ] = False
    """Show the device on which each operation of the training step runs; the full list is in the run's folder.
    Parameter servers do not support this."""
    ps: Annotated[int | None, Ge(1), OF_SERVERS] = None
    """Number of parameter servers, which hold the weights (default 1). Each of them uses one CPU, as does the process
    that assigns the work."""
    sync_replicas: Annotated[bool, Identity(When.WITH_SERVERS), InSearch.SIZES, OF_SERVERS] = False
    """With parameter servers: update with the mean of gradients that were all computed from the same weights."""
    replicas_to_aggregate: Annotated[int | None, InSearch.SIZES, OF_SERVERS] = None
    """With --sync-replicas: number of equal parts of a batch. Additional workers are backups that also compute some of
    the parts, and the first result counts. Default: the maximum number of workers, without backups."""

    @property
    def has_servers(self) -> bool:
        """Whether parameter servers hold the weights."""
        return self.strategy == "parameter-server"

    @property
    def uses_ray_train(self) -> bool:
        """Whether Ray Train runs the workers."""
        return not self.has_servers

    @property
    def is_without_gpus(self) -> bool:
        """Whether workers use no GPU, even if the cluster has GPUs."""
        return self.strategy == "tpu" or self.logical_devices is not None

    @property
    def helpers(self) -> int:
        """Number of processes besides the workers, with one CPU each: parameter servers, and one that assigns work."""
        return (self.ps or 1) + 1 if self.has_servers else 0


@dataclass(frozen=True)
class CheckpointSection:
    """When checkpoints are written, and how many are kept."""

    checkpoint_every_steps: Annotated[int | None, Ge(1), Usual()] = None
    """Number of steps between two checkpoints."""
    checkpoint_every_seconds: Annotated[float | None, Ge(0), Usual()] = None
    """Number of seconds between two checkpoints (default 30 if --checkpoint-every-steps is not passed). The first
    checkpoints after a start or a restart come sooner."""
    snapshot_every_steps: Annotated[
        int | None,
        Ge(0),
        not_with_servers(
            "the state is on the servers and is copied only to storage, as --checkpoint-every-steps sets",
            unless=(0,),
        ),
    ] = None
    """Number of steps between two copies of the state in the memory of the run's nodes, so that a failure costs few
    steps; 0 turns this off. By default as often as possible in less than 1 % of the time."""
    keep: Annotated[int, Ge(1)] = 3
    """Number of newest complete checkpoints to keep."""
    keep_best: str | None = None
    """Also keep the checkpoint of the epoch with the best value of a metric, such as val_accuracy or max:val_mine."""
