"""TrainConfig: every setting of a run, in frozen sections, checked before anything is started."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import tyro

from raytf.config import strategy_rules
from raytf.config.objective import Goal
from raytf.config.sections import (
    BatchSection,
    CheckpointSection,
    ClusterSection,
    ComputeSection,
    LengthSection,
    MixedPrecision,
    NoticeSection,
    RateSection,
    Reduction,
    RunSection,
    StrategySection,
    WorkerSection,
)
from raytf.errors import ConfigError
from raytf.storage import uris

#: Logical shards when neither the user nor the number of workers asks for more: one command then takes the same
#: global batches with 1, 2, 3 and 4 workers.
MIN_LOGICAL_SHARDS = 4

#: Logical shards whose 16-bit gradients keep 8 bits and a sign.
MOST_COMPRESSED_SHARDS = 128

_Flat = tyro.conf.OmitArgPrefixes


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run. Build it from flat names with `TrainConfig.of(epochs=3, workers="1:4")`."""

    run: RunSection = field(default_factory=RunSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    strategy: StrategySection = field(default_factory=StrategySection)
    notices: NoticeSection = field(default_factory=NoticeSection)
    length: LengthSection = field(default_factory=LengthSection)
    batch: BatchSection = field(default_factory=BatchSection)
    rate: RateSection = field(default_factory=RateSection)
    compute: ComputeSection = field(default_factory=ComputeSection)
    checkpoints: CheckpointSection = field(default_factory=CheckpointSection)

    @classmethod
    def of(cls, **settings: Any) -> TrainConfig:
        """Build a configuration from flag names, e.g. `of(global_batch_size=64, run="a")`.

        Raises:
            ConfigError: for a name that is not a setting.
        """
        return cls().replace(**settings)

    @classmethod
    def among(cls, flags: Mapping[str, Any]) -> TrainConfig:
        """Build a configuration from those of a job's flags that are settings."""
        return cls.of(**{name: value for name, value in flags.items() if name in cls().settings})

    @property
    def settings(self) -> dict[str, str]:
        """Flag name -> section, of all settings."""
        return {f.name: s.name for s in dataclasses.fields(self) for f in dataclasses.fields(getattr(self, s.name))}

    def replace(self, **settings: Any) -> TrainConfig:
        """A copy with some settings, given by flag name, changed."""
        owners = self.settings
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
        takes that of a run that exists already, so that no world size appears in it, and on GPUs `shards_on_gpus`."""
        if self.batch.logical_shards is not None:
            return self.batch.logical_shards
        if self.strategy.has_servers and not self.strategy.sync_replicas:
            return 1  # one worker computes a whole batch
        most = max(MIN_LOGICAL_SHARDS, self.worker_range[1], self.strategy.logical_devices or 1)
        return 1 << (most - 1).bit_length()

    def shards_on_gpus(self, each: float) -> int:
        """Logical shards of a new run on GPUs where none are given: the power of two from the most such GPUs up.

        There is no least: a GPU computes one large part faster than several small ones.

        Args:
            each: GPUs of a worker.
        """
        most = math.ceil(self.worker_range[1] * max(1.0, each))
        return 1 << (most - 1).bit_length()

    @property
    def worker_range(self) -> tuple[int, int]:
        """(fewest, most) workers, as the strategy takes them."""
        return strategy_rules.worker_range(self.strategy, self.cluster)

    @property
    def micro_batch_size(self) -> int:
        """Examples in one logical shard of a full global batch."""
        return self.batch.global_batch_size // self.logical_shards

    @property
    def storage_uri(self) -> str:
        """`--storage`, with `~` and relative folders made absolute."""
        uri = self.run.storage
        return os.path.abspath(os.path.expanduser(uri)) if uris.is_folder(uri) else uri

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
        self.strategy.check()
        most = self.worker_range[1]
        for flag, value, least in (
            ("--epochs", length.epochs, 1),
            ("--steps", length.steps, 1),
            ("--global-batch-size", batch.global_batch_size, 1),
            ("--logical-shards", batch.logical_shards, 1),
            ("--seed", batch.seed, 0),
            ("--histograms-every", self.run.histograms_every, 0),
            ("--steps-per-call", self.compute.steps_per_call, 0),
            ("--checkpoint-every-steps", self.checkpoints.checkpoint_every_steps, 1),
            ("--checkpoint-every-seconds", self.checkpoints.checkpoint_every_seconds, 0),
            ("--snapshot-every-steps", self.checkpoints.snapshot_every_steps, 0),
            ("--keep", self.checkpoints.keep, 1),
            ("--resize-every-seconds", self.cluster.resize_every_seconds, 0),
            ("--max-failures", self.cluster.max_failures, -1),
            ("--hang-seconds", self.cluster.hang_seconds, 0),
            ("--logical-devices", self.strategy.logical_devices, 1),
            ("--ps", self.strategy.ps, 1),
            ("--base-batch-size", self.rate.base_batch_size, 1),
            ("--warmup-epochs", self.rate.warmup_epochs, 0),
        ):
            if value is None:
                continue
            if isinstance(value, str) or not value >= least:
                raise ConfigError(f"{flag} {value}: expected a number, {least} or more.")
            if not flag.endswith(("-seconds", "--warmup-epochs")) and value != int(value):
                raise ConfigError(f"{flag} {value}: expected a whole number.")
        for flag, choice, known in (
            ("--mixed-precision", self.compute.mixed_precision, get_args(MixedPrecision)),
            ("--reduction", self.compute.reduction, get_args(Reduction)),
        ):
            if choice is not None and choice not in known:
                raise ConfigError(f"{flag} {choice}: expected one of {', '.join(known)}.")
        self.notices.check()
        strategy_rules.check(self.strategy, self.cluster, self.compute)
        self.strategy.check_servers(most)
        if self.strategy.has_servers:
            self._check_for_servers()
        self.rate.check()
        if self.compute.exact and self.compute.reduction == "float":
            raise ConfigError(
                "--exact with --reduction float: a float sum depends on its order, hence on the number of workers. "
                "Leave out --reduction float, or --exact."
            )
        if self.compute.exact and self.compute.jit and not self.cluster.use_gpu:
            raise ConfigError(
                "--exact with --jit: on CPUs XLA may fuse and order the same arithmetic in another way on each machine "
                "and change last bits. Leave out --jit, or --exact; on GPUs of one kind give --use-gpu, too."
            )
        if not self.run.storage:
            raise ConfigError(f"--storage is empty. {uris.EXPECTED}.")
        uris.parse(self.run.storage)
        if batch.seed > 2**32 - 1:
            raise ConfigError(f"--seed {batch.seed}: expected at most {2**32 - 1}.")
        self.cluster.check()
        if self.checkpoints.keep_best is not None:
            Goal.of(self.checkpoints.keep_best)
        shards, devices = self.logical_shards, self.strategy.logical_devices or 1
        if shards < devices:
            raise ConfigError(
                f"--logical-devices {devices} with {shards} logical shards: a device without a shard has nothing to "
                f"do. Give at most {shards} devices, or, for a new run, --logical-shards {devices} or more."
            )
        if self.compute.compress_gradients and shards > MOST_COMPRESSED_SHARDS:
            raise ConfigError(
                f"--compress-gradients with {shards} logical shards: their sum must fit 16 bits, which leaves each "
                f"fewer than 8. Leave it out, or give --logical-shards {MOST_COMPRESSED_SHARDS} or fewer."
            )
        most = self.parts
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

    @property
    def parts(self) -> int:
        """Most processes among which one batch is divided."""
        if self.strategy.has_servers and not self.strategy.sync_replicas:
            return 1
        return self.strategy.replicas_to_aggregate or self.worker_range[1]

    def _check_for_servers(self) -> None:
        """Refuse what does nothing, or cannot be had, with parameter servers."""
        why_exact = (
            "how many updates lie between a worker's reading of the weights and its own depends on who was faster, so "
            "no two runs are alike; and a worker that dies may have its last updates applied twice"
        )
        if self.strategy.sync_replicas:
            why_exact = "gradients are added as floats there, in an order that depends on the number of parts"
        defaults = ClusterSection()
        for flag, is_given, why in (
            ("--exact", self.compute.exact, why_exact),
            ("--mixed-precision float16", self.compute.mixed_precision == "float16",
             "the loss scale would be one more number that all workers write at once; bfloat16 needs none"),
            ("--compress-gradients", self.compute.compress_gradients,
             "gradients go from each worker to the servers, which take them as they are"),
            ("--log-device-placement", self.strategy.log_device_placement,
             "workers are TensorFlow servers, which tell nobody where they put an operation; gradients are computed on "
             "the devices that --show-cluster shows, updates where `placement` in result.json says that the weight is"),
            ("--snapshot-every-steps", bool(self.checkpoints.snapshot_every_steps),
             "the state lives on the servers, and is copied to storage alone; --checkpoint-every-steps says when"),
            ("--replace-stragglers", self.cluster.replace_stragglers,
             "nobody waits for a slow worker; with --sync-replicas, --replicas-to-aggregate gives it backups"),
            ("--resize-every-seconds", self.cluster.resize_every_seconds != defaults.resize_every_seconds,
             "the number of workers is that of the start, until the group starts anew"),
            ("--steps-per-call", self.strategy.sync_replicas and self.compute.steps_per_call > 1,
             "with --sync-replicas each step is a call of its own"),
        ):  # fmt: skip
            if is_given:
                raise ConfigError(f"{flag} with --strategy parameter-server: {why}. Leave it out.")


#: The annotation a job's dataclass gives its TrainConfig field, so that `--run` is not `--train.run.run`.
Flags = _Flat[TrainConfig]  # type: ignore[type-arg]
#: The same for a job that does not train: --workers, --use-gpu and --cpus-per-worker for `raytf.on_workers`.
WorkerFlags = _Flat[WorkerSection]  # type: ignore[type-arg]
