"""TrainConfig: every setting of a run, in frozen sections, checked before anything is started.

The sections are what `--help` shows, one group each; the field names are the flags.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import urllib.parse
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, get_args

import tyro

from raytf.errors import ConfigError
from raytf.goal import Goal

MixedPrecision = Literal["off", "bfloat16", "float16"]
Reduction = Literal["fixed", "float"]
Notices = Literal["auto", "aws", "gcp", "azure", "off"]

#: Logical shards when neither the user nor the number of workers asks for more: one command then takes the same
#: global batches with 1, 2, 3 and 4 workers.
MIN_LOGICAL_SHARDS = 4


@dataclass(frozen=True)
class RunSection:
    """Which run this is and where it is kept."""

    run: str = "default"
    """Name of the run; the same name on the same storage goes on where that run stopped."""
    storage: str = "~/raytf-runs"
    """Where runs are kept: a folder, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX."""
    status_file: str | None = None
    """Keep the latest status as JSON in this local file, for scripts that watch the run."""
    verbose: bool = False
    """Show the messages of TensorFlow and Ray too."""


@dataclass(frozen=True)
class ClusterSection:
    """What the run takes from the cluster."""

    workers: Annotated[str, tyro.conf.arg(metavar="N|MIN:MAX")] = "2"
    """Number of workers, or the fewest and the most."""
    use_gpu: Annotated[bool | None, tyro.conf.arg(metavar="| --no-use-gpu")] = None
    """One GPU for each worker; by default when the cluster has any."""
    cpus_per_worker: float = 1.0
    """CPUs, and threads of TensorFlow, for each worker. Other numbers of threads may change the last bit of a sum."""
    resize_every_seconds: float = 60.0
    """Least time between two changes of the number of workers that follow nodes which come or go with notice."""
    max_failures: int = -1
    """How often lost workers are replaced before the run gives up; -1 is without end. Errors of storage that come five
    times in a row without a new step end it all the same."""

    hang_seconds: float = 30.0
    """Seconds within which a worker that makes no progress is found, or 20 steps where that is longer; callbacks,
    saves, validation, compiling and restoring have ten or twenty times that. 0 never looks for one."""
    replace_stragglers: bool = False
    """Move a worker that is slower than its peers for long to another node, where the cluster has one."""
    warm_workers: bool = True
    """Keep processes that have imported TensorFlow ready on each node, one for each worker, about 0.7 GB each: a lost
    worker is replaced in half the time. A node with less than 2 GiB of free memory beside them does without."""

    @property
    def worker_range(self) -> tuple[int, int]:
        """(fewest, most) workers."""
        low, colon, high = str(self.workers).partition(":")
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


@dataclass(frozen=True)
class NoticeSection:
    """Whose notices of preemption each node watches for."""

    notices: Notices = "auto"
    """The cloud whose metadata service each node asks; auto finds out, and finds none on a laptop."""
    notice_url: str | None = None
    """Base URL of that service where it is not the cloud's own; {node_id} stands for Ray's id of the node."""
    follow_warnings: bool = False
    """Leave a node also on a mere warning: a rebalance recommendation of AWS, a move or pause without restart. Without
    it they are only told."""

    def check(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: says which setting, what was expected and how to mend it.
        """
        if self.notices not in get_args(Notices):
            raise ConfigError(f"--notices {self.notices}: expected one of {', '.join(get_args(Notices))}.")
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
                "without a path of the cloud's."
            )


@dataclass(frozen=True)
class LengthSection:
    """How long the run is."""

    epochs: int | None = None
    """Passes over the training data (default 1 when --steps is not given either)."""
    steps: int | None = None
    """Global steps, instead of epochs."""


@dataclass(frozen=True)
class BatchSection:
    """What one step learns from. These define the run and cannot change when it is resumed."""

    global_batch_size: int = 128
    """Examples in one step, over all workers together."""
    logical_shards: int | None = None
    """Equal parts of a global batch; each is one micro-batch of one worker. Default: those of the run,
    else a power of two, at least the most workers and 4."""
    seed: int = 0
    """Seed of initial weights, data order, dropout and augmentation."""


@dataclass(frozen=True)
class ComputeSection:
    """How a step is computed."""

    mixed_precision: MixedPrecision = "off"
    """Compute in 16 bits, keep variables in 32."""
    jit: bool = False
    """Compile the gradient function with XLA."""
    exact: bool = False
    """Promise the same weights to the last bit for every number of workers and every failure, or refuse and say why."""
    reduction: Reduction = "fixed"
    """How gradients are added: fixed (fixed point, the same for every order of addition) or float."""
    steps_per_call: int = 0
    """Steps run by one call into TensorFlow; 0 picks it from the measured step time."""


@dataclass(frozen=True)
class CheckpointSection:
    """When checkpoints are written and how many stay."""

    checkpoint_every_steps: int | None = None
    """Save after this many steps."""
    checkpoint_every_seconds: float | None = None
    """Save after this many seconds (default 30 when --checkpoint-every-steps is not given either)."""
    snapshot_every_steps: int | None = None
    """Copy the state into memory of the run's nodes after this many steps, so that a failure costs few; 0 never does.
    By default as often as takes less than 1 % of the time."""
    keep: int = 3
    """Newest complete checkpoints that are kept."""
    keep_best: str | None = None
    """Keep the checkpoint of the epoch with the best value of a metric, too, such as val_accuracy or max:val_mine."""


_Flat = tyro.conf.OmitArgPrefixes


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run. Build it from flat names with `TrainConfig.of(epochs=3, workers="1:4")`."""

    run: RunSection = field(default_factory=RunSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    notices: NoticeSection = field(default_factory=NoticeSection)
    length: LengthSection = field(default_factory=LengthSection)
    batch: BatchSection = field(default_factory=BatchSection)
    compute: ComputeSection = field(default_factory=ComputeSection)
    checkpoints: CheckpointSection = field(default_factory=CheckpointSection)

    @classmethod
    def of(cls, **settings: Any) -> TrainConfig:
        """Build a configuration from flag names, e.g. `of(global_batch_size=64, run="a")`.

        Raises:
            ConfigError: for a name that is not a setting.
        """
        return cls().replace(**settings)

    def replace(self, **settings: Any) -> TrainConfig:
        """A copy with some settings, given by flag name, changed."""
        owners = {f.name: s.name for s in dataclasses.fields(self) for f in dataclasses.fields(getattr(self, s.name))}
        sections: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            if name not in owners:
                near = difflib.get_close_matches(name, owners, n=1)
                hint = f" Did you mean {near[0]!r}?" if near else f" Settings are: {', '.join(sorted(owners))}."
                raise ConfigError(f"unknown setting {name!r}.{hint}")
            sections.setdefault(owners[name], {})[name] = value
        changed = {s: dataclasses.replace(getattr(self, s), **values) for s, values in sections.items()}
        return dataclasses.replace(self, **changed)

    def lasting(self, epochs: int) -> TrainConfig:
        """A copy that runs for so many epochs, unless the user said how long."""
        said = self.length.epochs is not None or self.length.steps is not None
        return self if said else self.replace(epochs=epochs)

    @property
    def logical_shards(self) -> int:
        """Equal parts of a global batch: as given, else the power of two from the most workers up, at least 4. `fit`
        takes that of a run that exists already, so that no world size appears in it."""
        if self.batch.logical_shards is not None:
            return self.batch.logical_shards
        return 1 << (max(MIN_LOGICAL_SHARDS, self.cluster.worker_range[1]) - 1).bit_length()

    @property
    def micro_batch_size(self) -> int:
        """Examples in one logical shard of a full global batch."""
        return self.batch.global_batch_size // self.logical_shards

    @property
    def storage_uri(self) -> str:
        """`--storage`, with `~` and relative folders made absolute."""
        uri = self.run.storage
        return uri if "://" in uri else os.path.abspath(os.path.expanduser(uri))

    def check(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: says which setting, what was expected and how to mend it.
        """
        run, length, batch = self.run.run, self.length, self.batch
        if length.epochs is not None and length.steps is not None:
            raise ConfigError("--epochs and --steps exclude each other: give one of them.")
        if not run or run.startswith(".") or not all(c.isalnum() or c in "-_." for c in run):
            raise ConfigError(f"--run {run!r}: expected a name of letters, digits, '-', '_' and '.', such as mnist-1.")
        most = self.cluster.worker_range[1]
        for flag, value, least in (
            ("--epochs", length.epochs, 1),
            ("--steps", length.steps, 1),
            ("--global-batch-size", batch.global_batch_size, 1),
            ("--logical-shards", batch.logical_shards, 1),
            ("--seed", batch.seed, 0),
            ("--steps-per-call", self.compute.steps_per_call, 0),
            ("--checkpoint-every-steps", self.checkpoints.checkpoint_every_steps, 1),
            ("--checkpoint-every-seconds", self.checkpoints.checkpoint_every_seconds, 0),
            ("--snapshot-every-steps", self.checkpoints.snapshot_every_steps, 0),
            ("--keep", self.checkpoints.keep, 1),
            ("--resize-every-seconds", self.cluster.resize_every_seconds, 0),
            ("--max-failures", self.cluster.max_failures, -1),
            ("--hang-seconds", self.cluster.hang_seconds, 0),
        ):
            if value is None:
                continue
            if isinstance(value, str) or not value >= least:
                raise ConfigError(f"{flag} {value}: expected a number, {least} or more.")
            if not flag.endswith("-seconds") and value != int(value):
                raise ConfigError(f"{flag} {value}: expected a whole number.")
        for flag, choice, known in (
            ("--mixed-precision", self.compute.mixed_precision, get_args(MixedPrecision)),
            ("--reduction", self.compute.reduction, get_args(Reduction)),
        ):
            if choice not in known:
                raise ConfigError(f"{flag} {choice}: expected one of {', '.join(known)}.")
        self.notices.check()
        if self.compute.exact and self.compute.reduction == "float":
            raise ConfigError(
                "--exact with --reduction float: a float sum depends on its order, hence on the number of workers. "
                "Leave out --reduction float, or --exact."
            )
        if self.compute.exact and self.compute.jit:
            raise ConfigError(
                "--exact with --jit: XLA may fuse and order the same arithmetic in another way on each machine, which "
                "changes last bits. Leave out --jit, or --exact."
            )
        if not self.run.storage:
            raise ConfigError("--storage is empty. Expected a folder, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX.")
        if batch.seed > 2**32 - 1:
            raise ConfigError(f"--seed {batch.seed}: expected at most {2**32 - 1}.")
        if not 0 < self.cluster.cpus_per_worker < float("inf"):
            raise ConfigError(f"--cpus-per-worker {self.cluster.cpus_per_worker}: expected a number above 0.")
        if self.checkpoints.keep_best is not None:
            Goal.of(self.checkpoints.keep_best)
        shards = self.logical_shards
        if shards < most:
            raise ConfigError(
                f"--logical-shards {shards} with up to {most} workers: a worker without a shard has nothing to do. "
                f"Give at least {most} shards or at most {shards} workers."
            )
        if batch.global_batch_size % shards:
            size = batch.global_batch_size
            near = max(shards, round(size / shards) * shards)
            fitting = [v for v in range(most, size + 1) if size % v == 0]
            other = f", or --logical-shards {fitting[0]}" if fitting else ""
            raise ConfigError(
                f"--global-batch-size {size} cannot be cut into {shards} equal logical shards. "
                f"Use --global-batch-size {near}{other}."
            )


#: The annotation a job's dataclass gives its TrainConfig field, so that `--run` is not `--train.run.run`.
Flags = _Flat[TrainConfig]  # type: ignore[type-arg]
