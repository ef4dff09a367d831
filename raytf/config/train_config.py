"""TrainConfig: every setting of a run, in frozen sections, checked before the run starts."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Unpack, get_type_hints

import tyro

from raytf.config import setting
from raytf.config.flags import (
    NCCL_WITHOUT_GPU,
    ONE_WORKER,
    BatchSection,
    CheckpointSection,
    ClusterSection,
    ComputeSection,
    LengthSection,
    NoticeSection,
    RateSection,
    RunSection,
    StrategySection,
    WorkerSection,
)
from raytf.config.keywords import Settings
from raytf.config.objective import MetricObjective
from raytf.config.setting import Setting
from raytf.errors import ClusterError, ConfigError, ExactnessError, ModelError
from raytf.storage import uris

#: Minimum number of logical shards if none is set, so that one command computes the same global batches with 1, 2, 3
#: and 4 workers.
MIN_LOGICAL_SHARDS = 4

#: Maximum number of logical shards with compressed gradients, which then keep 8 bits and a sign.
MOST_COMPRESSED_SHARDS = 128

_Flat = tyro.conf.OmitArgPrefixes


@dataclass(frozen=True, init=False)
class TrainConfig:
    """All settings of a run, such as `TrainConfig(epochs=3, workers="1:4")`.

    Raises:
        ConfigError: a setting is unknown or its value is not allowed.
    """

    run: RunSection = field(default_factory=RunSection)
    cluster: ClusterSection = field(default_factory=ClusterSection)
    strategy: StrategySection = field(default_factory=StrategySection)
    notices: NoticeSection = field(default_factory=NoticeSection)
    length: LengthSection = field(default_factory=LengthSection)
    batch: BatchSection = field(default_factory=BatchSection)
    rate: RateSection = field(default_factory=RateSection)
    compute: ComputeSection = field(default_factory=ComputeSection)
    checkpoints: CheckpointSection = field(default_factory=CheckpointSection)

    #: Whether the settings come from flags, not from a program's keyword arguments.
    is_from_flags = False
    #: The name of the program if `raytf run` started this run; empty for any other run.
    program = ""

    def __init__(self, **settings: Unpack[Settings]):
        # tyro passes whole sections after it has parsed flags. Two sections are named like one of their own settings.
        passed: dict[str, Any] = dict(settings)
        for name, kind in section_types().items():
            section = kind()
            if isinstance(passed.get(name), kind):
                section = passed.pop(name)
                object.__setattr__(self, "is_from_flags", True)
            values = {its.name: passed.pop(its.name) for its in setting.of(kind) if its.name in passed}
            object.__setattr__(self, name, dataclasses.replace(section, **_plain(values)))
        _plain(passed)

    @classmethod
    def of(cls, **settings: Unpack[Settings]) -> TrainConfig:
        """Build a configuration, as `TrainConfig(...)` does: `of(global_batch_size=64, run="a")`.

        Raises:
            ConfigError: a setting is unknown or its value is not allowed.
        """
        return cls(**settings)

    @classmethod
    def among(cls, flags: Mapping[str, Any]) -> TrainConfig:
        """Build a configuration from the job's flags that are settings, and ignore others. Values are not checked."""
        config = cls()._with({name: value for name, value in flags.items() if name in cls().settings})
        object.__setattr__(config, "is_from_flags", True)
        return config

    @property
    def sections(self) -> dict[str, Any]:
        """All sections: name -> section."""
        return {name: getattr(self, name) for name in section_types()}

    @property
    def settings(self) -> dict[str, str]:
        """All settings: setting name -> section name."""
        return {its.name: name for name, kind in section_types().items() for its in setting.of(kind)}

    @property
    def values(self) -> dict[str, Any]:
        """All settings: setting name -> value."""
        return {name: getattr(getattr(self, section), name) for name, section in self.settings.items()}

    @property
    def changed(self) -> dict[str, str]:
        """Settings that differ from their defaults: flag -> value as text; a switch is on or off."""
        values, words = self.values, {"True": "on", "False": "off"}
        texts = {its.flag: str(values[its.name]) for its in every_setting() if values[its.name] != its.default}
        return {flag: words.get(text, text) for flag, text in texts.items()}

    def replace(self, **settings: Unpack[Settings]) -> TrainConfig:
        """Return a copy with some settings changed.

        Raises:
            ConfigError: a setting is unknown or its value is not allowed.
        """
        return self._with(_plain(settings))

    def _with(self, settings: Mapping[str, Any]) -> TrainConfig:
        sections: dict[str, dict[str, Any]] = {}
        for name, value in settings.items():
            sections.setdefault(self.settings[name], {})[name] = value
        changed = {name: dataclasses.replace(getattr(self, name), **values) for name, values in sections.items()}
        config = TrainConfig(**{**self.sections, **changed})
        for name in ("is_from_flags", "program"):
            object.__setattr__(config, name, getattr(self, name))
        return config

    def of_program(self, storage: str, call: int) -> TrainConfig:
        """Return a copy for one of the runs of a program that `raytf run` started."""
        config = self.replace(storage=storage, run=str(call))
        object.__setattr__(config, "program", self.run.name)
        return config

    @property
    def run_name(self) -> str:
        """The run's full name for display: `mnist`, or `train/1` for a run of a program."""
        return f"{self.program}/{self.run.name}" if self.program else self.run.name

    def lasting(self, epochs: int) -> TrainConfig:
        """Return a copy that runs for that many epochs, unless the user set --epochs or --steps."""
        is_set = self.length.epochs is not None or self.length.steps is not None
        return self if is_set else self.replace(epochs=epochs)

    @property
    def logical_shards(self) -> int:
        """Equal parts of a global batch: as set, otherwise the next power of two from the most workers up, at least 4.
        `fit` uses the number of an existing run, if there is one, and `shards_on_gpus` for a new run on GPUs."""
        if self.batch.logical_shards is not None:
            return self.batch.logical_shards
        if self.strategy.has_servers and not self.strategy.sync_replicas:
            return 1  # one worker computes a whole batch
        most = max(MIN_LOGICAL_SHARDS, self.worker_range[1], self.strategy.logical_devices or 1)
        return 1 << (most - 1).bit_length()

    def shards_on_gpus(self, gpus: float) -> int:
        """Return the default number of logical shards on GPUs: the next power of two from the most GPUs up.

        There is no minimum, because a GPU computes one large part faster than several small ones.
        """
        most = math.ceil(self.worker_range[1] * max(1.0, gpus))
        return 1 << (most - 1).bit_length()

    @property
    def worker_range(self) -> tuple[int, int]:
        """The fewest and the most workers that the strategy allows."""
        return worker_range(self.strategy, self.cluster)

    @property
    def micro_batch_size(self) -> int:
        """Examples in the largest logical shard of a full global batch."""
        return -(-self.batch.global_batch_size // self.logical_shards)

    @property
    def storage_uri(self) -> str:
        """`--storage`, with `~` and relative folders made absolute."""
        uri = self.run.storage
        return os.path.abspath(os.path.expanduser(uri)) if uris.is_folder(uri) else uri

    def as_typed(self, text: str) -> str:
        """Return a text with settings as the user typed them: as flags, or as keyword arguments."""
        return text if self.is_from_flags else as_keyword_arguments(text)

    def named_as_typed(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which errors name settings as the user typed them: as flags, or as keyword arguments."""
        return contextlib.nullcontext() if self.is_from_flags else _named_as_keyword_arguments()

    def check(self) -> None:
        """Check that the settings can work together.

        Raises:
            ConfigError: a setting cannot work; the message says what was expected and how to fix it.
        """
        with self.named_as_typed():
            self._check()

    def _check(self) -> None:
        self._check_run()
        setting.check(self.strategy)
        worker_range(self.strategy, self.cluster)
        for section in self.sections.values():
            setting.check(section)
        self.notices.check()
        for section in self.sections.values():
            _check_taken(section, self.strategy)
        _check_together(self.strategy, self.cluster, self.compute)
        self._check_exact()
        if not self.run.storage:
            raise ConfigError(f"--storage is empty. {uris.EXPECTED}.")
        uris.parse(self.run.storage)
        if self.checkpoints.keep_best is not None:
            MetricObjective.of(self.checkpoints.keep_best)
        self._check_shards()

    def _check_run(self) -> None:
        run, length = self.run.run, self.length
        if length.epochs is not None and length.steps is not None:
            raise ConfigError("--epochs and --steps exclude each other: pass one of them.")
        if run is None:
            return
        if not run or run.startswith(".") or not all(c.isalnum() or c in "-_." for c in run):
            raise ConfigError(f"--run {run!r}: expected a name of letters, digits, '-', '_' and '.', such as mnist-1.")

    def _check_exact(self) -> None:
        if self.compute.exact and self.compute.reduction == "float":
            raise ConfigError(
                "--exact with --reduction float: a float sum depends on its order, hence on the number of workers. "
                "Leave out --reduction float, or --exact."
            )
        if self.compute.exact and self.compute.jit and not self.cluster.use_gpu:
            raise ConfigError(
                "--exact with --jit: on CPUs XLA may fuse and order the same arithmetic in another way on each machine "
                "and change last bits. Leave out --jit, or --exact; on GPUs of one kind, pass --use-gpu, too."
            )

    def _check_shards(self) -> None:
        """Refuse a batch that cannot be divided among shards, or shards that cannot be among devices and workers."""
        shards, devices = self.logical_shards, self.strategy.logical_devices or 1
        if shards < devices:
            raise ConfigError(
                f"--logical-devices {devices} with {shards} logical shards: each device needs at least one shard. "
                f"Use at most {shards} devices, or, for a new run, --logical-shards {devices} or more."
            )
        if self.compute.compress_gradients and shards > MOST_COMPRESSED_SHARDS:
            raise ConfigError(
                f"--compress-gradients with {shards} logical shards: their sum must fit 16 bits, which leaves fewer "
                f"than 8 for each. Leave it out, or pass --logical-shards {MOST_COMPRESSED_SHARDS} or fewer."
            )
        most = self.parts
        if shards < most:
            raise ConfigError(
                f"--logical-shards {shards} with up to {most} workers: each worker needs at least one shard. "
                f"Use at least {most} shards or at most {shards} workers."
            )
        size = self.batch.global_batch_size
        if size % shards and self.strategy.has_servers:
            near = max(shards, round(size / shards) * shards)
            fitting = [v for v in range(most, size + 1) if size % v == 0]
            other = f", or --logical-shards {fitting[0]}" if fitting else ""
            raise ConfigError(
                f"--global-batch-size {size} cannot be divided into {shards} equal logical shards, which "
                f"--strategy parameter-server requires. Use --global-batch-size {near}{other}."
            )

    @property
    def parts(self) -> int:
        """The maximum number of processes among which one batch is divided."""
        if self.strategy.has_servers and not self.strategy.sync_replicas:
            return 1
        return self.strategy.replicas_to_aggregate or self.worker_range[1]


def worker_range(strategy: StrategySection, cluster: ClusterSection) -> tuple[int, int]:
    """Return the fewest and the most workers, or refuse a number that the strategy does not allow."""
    if strategy.strategy not in ONE_WORKER:
        return cluster.worker_range
    if cluster.workers is not None and cluster.worker_range != (1, 1):
        raise ConfigError(
            f"--workers {cluster.workers} with --strategy {strategy.strategy}: this strategy has one worker, whose "
            "devices share the work. Leave out --workers, or pass --strategy multi-worker-mirrored."
        )
    return 1, 1


def _check_taken(section: Any, strategy: StrategySection) -> None:
    name = strategy.strategy
    for its, value in setting.values(section):
        for refused in its.refusals:
            is_fine = value == its.default or value in refused.unless
            if name in refused.by and refused.sync_replicas in (None, strategy.sync_replicas) and not is_fine:
                raise ConfigError(refused.message.format(typed=its.typed(value), flag=its.flag, strategy=name))


def _check_together(strategy: StrategySection, cluster: ClusterSection, compute: ComputeSection) -> None:
    if strategy.logical_devices is not None and cluster.use_gpu:
        raise ConfigError(
            f"--logical-devices {strategy.logical_devices} with --use-gpu: logical devices are parts of the CPU. Pass "
            "one of them."
        )
    if strategy.communication == "nccl" and cluster.use_gpu is False:
        raise ConfigError(NCCL_WITHOUT_GPU)
    share = cluster.gpus_per_worker
    if strategy.communication == "nccl" and share < 1:
        raise ConfigError(
            f"--communication nccl with --gpus-per-worker {share:g}: NCCL refuses two workers on one GPU. Leave out "
            "one of them; by default workers that share a GPU add their gradients in the host's memory."
        )
    if share != 1 and (cluster.use_gpu is False or strategy.is_without_gpus):
        why = "--no-use-gpu" if cluster.use_gpu is False else f"--strategy {strategy.strategy} on other devices"
        raise ConfigError(f"--gpus-per-worker {share:g} with {why}: the workers have no GPU. Pass one of them.")
    if compute.compress_gradients and compute.reduction == "float":
        raise ConfigError(
            "--compress-gradients with --reduction float: the 16 bits are fixed point, since a sum of 16-bit floats "
            "depends on its order and loses small values. Leave out one of them."
        )
    _check_aggregation(strategy, worker_range(strategy, cluster)[1])


def _check_aggregation(strategy: StrategySection, most_workers: int) -> None:
    parts = strategy.replicas_to_aggregate
    if parts is None:
        return
    if not strategy.sync_replicas:
        raise ConfigError(
            f"--replicas-to-aggregate {parts}: without --sync-replicas every gradient is a separate update. "
            "Add --sync-replicas, or leave it out."
        )
    if not isinstance(parts, int) or not 1 <= parts <= most_workers:
        raise ConfigError(
            f"--replicas-to-aggregate {parts} with up to {most_workers} workers: expected 1 to {most_workers}. "
            "Additional workers are backups."
        )


@functools.cache
def section_types() -> dict[str, type]:
    """Return the class of each section."""
    return get_type_hints(TrainConfig)


@functools.cache
def every_setting() -> tuple[Setting, ...]:
    """Return all settings of a run, in the order of sections and fields."""
    return tuple(its for section in section_types().values() for its in setting.of(section))


def by_name(name: str) -> Setting:
    """Return a setting, or raise a ConfigError that suggests the closest match."""
    known = {its.name: its for its in every_setting()}
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else f" Settings are: {', '.join(sorted(known))}."
        raise ConfigError(f"unknown setting {name!r}.{hint}")
    return known[name]


#: A flag in a message, and the word after it, which may be its value.
_FLAG = re.compile(r"--(no-)?([a-z][a-z-]+)(?: ('[^']*'|\S+?(?=[.,;:]?(?:\s|$))))?")


def as_keyword_arguments(message: str) -> str:
    """Return a message with its flags written as keyword arguments: `--workers 2` as `workers=2`.

    A word after a flag is its value if the setting allows it. For a text setting, the word is the value if it is
    quoted, if the flag begins the message and a colon follows the word, or if the flag follows the word "with".
    """
    known = {its.flag.removeprefix("--"): its for its in every_setting()}

    def written(match: re.Match[str]) -> str:
        no, flag, word = match.groups()
        its = known.get(flag)
        if its is None:
            return match[0]
        after = "" if word is None else f" {word}"
        if its.kinds == (bool,):
            return f"{its.name}={not no}{after}"
        before, rest = message[: match.start()], message[match.end() :]
        value = _value_of(its, word or "", before.endswith("with ") or (not before and rest.startswith(":")))
        return f"{its.name}{after}" if value is None else f"{its.name}={value}"

    return _FLAG.sub(written, message)


@contextlib.contextmanager
def _named_as_keyword_arguments() -> Iterator[None]:
    try:
        yield
    except (ClusterError, ConfigError, ExactnessError, ModelError) as error:
        error.args = (as_keyword_arguments(str(error)),)
        raise


def _value_of(its: Setting, word: str, is_likely: bool) -> str | None:
    """Return a word of a message as a Python literal, or None if it is no value of the setting."""
    if word.startswith("'") or re.fullmatch(r"-?[\d.]+", word):
        return word
    is_text = bool(word) and not its.choices and its.kinds == (str,)
    is_value = word in its.choices or (is_text and (is_likely or re.fullmatch(r"\d+:\d+", word)))
    return repr(word) if is_value else None


def _plain(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert settings that a program passed to the values that flags would have."""
    with _named_as_keyword_arguments():
        return {name: by_name(name).from_python(value) for name, value in settings.items()}


#: The annotation for the TrainConfig field of a job's dataclass; the flag is then `--run`, not `--train.run.run`.
Flags = _Flat[TrainConfig]  # type: ignore[type-arg]
#: The same for a job that does not train: --workers, --use-gpu and --cpus-per-worker for `raytf.on_workers`.
WorkerFlags = _Flat[WorkerSection]  # type: ignore[type-arg]
