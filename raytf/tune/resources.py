"""The resources of a search's trials on a cluster: decisions without Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raytf.config import resources
from raytf.config.resources import placed
from raytf.config.setting import InSearch
from raytf.config.train_config import TrainConfig, every_setting
from raytf.errors import ConfigError

#: Flags that say how many workers a trial has, or into how many parts they cut a batch.
_SIZES = {setting.name for setting in every_setting() if InSearch.SIZES in setting.in_search}


@dataclass(frozen=True)
class TrialResources:
    """How the trials share a cluster.

    Attributes:
        parallel: trials at a time.
        flags: that the trials get so that they fit beside each other.
    """

    parallel: int
    flags: list[str] = field(default_factory=list)


def largest(values: Mapping[str, Any], points: Sequence[Mapping[str, Any]]) -> TrainConfig:
    """Return the configuration of the trial that takes the most CPUs.

    Args:
        values: of all flags of the job.
        points: values of the searched flags, by trial.

    Raises:
        ConfigError: no trial can have workers as it asks for them.
    """
    configs: list[tuple[float, TrainConfig]] = []
    refused = ConfigError("there is no trial.")
    for point in points:
        try:
            config = TrainConfig.among({**values, **point})
            config.cluster.check()
            configs.append((resources.cpus(config.strategy, config.cluster, config.worker_range[1]), config))
        except ConfigError as error:
            refused = error  # of one trial among others; that trial will say it
        except TypeError:
            continue  # a word where the flag takes a number, likewise
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
    """Decide how trials share a cluster. By default each has the most workers that it asks for, and as many run as fit.

    With more at a time than that each gets at most its part, and never fewer workers than it asks for at least. Its
    logical shards stay those of the most workers, so it learns the same.

    Args:
        config: of the trial that takes the most.
        nodes: all of each living node.
        worker: amounts of one worker.
        trials: of the search.
        parallel: as asked for.
        searched: names of flags.
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
    # Gradients are not aggregated from more parts than there may be workers.
    least = max(low, config.strategy.replicas_to_aggregate or low)
    part = next((workers for workers in range(high, least, -1) if fit(workers, count) == count), least)
    if part == high or _SIZES & set(searched):
        return TrialResources(count)
    return TrialResources(count, [f"--workers={low}:{part}", f"--logical-shards={config.logical_shards}"])
