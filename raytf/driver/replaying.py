"""A start of a program that computes some steps of a run again, beside the run, because `raytf replay` asks for it.

The program is the run's own. Its call of `fit` for that run trains in another folder, from a copy of a checkpoint up to
the step that is wanted, and ends the process: what comes after it in the program belongs to the run.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raytf.config.train_config import TrainConfig
from raytf.errors import ConfigError
from raytf.runs import run_log
from raytf.storage.storage import Storage

#: Environment variable with which `raytf replay` tells the program, which need not know of it.
VARIABLE = "RAYTF_REPLAY"
#: Name of the run that computes again.
RUN = "replay"
#: Settings that only write elsewhere, or end a run early.
_WITHOUT: dict[str, Any] = {
    "track": None,
    "keep_best": None,
    "status_file": None,
    "histograms_every": 0,
    "warm_workers": False,
}


@dataclass(frozen=True)
class ReplayPlan:
    """What to compute again.

    Attributes:
        run: URI of the run's folder.
        step: the last step.
        workers: how many compute.
        folder: where the run that computes again is kept, as `RUN`.
        dump: folder for what there is to see of the step; empty for none.
    """

    run: str
    step: int
    workers: int
    folder: str
    dump: str = ""

    def told(self) -> dict[str, str]:
        """The environment of the program."""
        return {VARIABLE: json.dumps(asdict(self))}


def asked(config: TrainConfig, environment: Mapping[str, str] = os.environ) -> ReplayPlan | None:
    """What this process is to compute again of the run that a configuration names; None where that is to be trained."""
    plan = _plan(environment)
    if plan is None:
        return None
    run = Storage(config.storage_uri).child(config.run.name)
    return plan if run.locate("") == Storage(plan.run).locate("") else None


def is_asked(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process was started to compute steps of a run again."""
    return bool(environment.get(VARIABLE))


def with_room(config: TrainConfig, environment: Mapping[str, str] = os.environ) -> TrainConfig:
    """The settings by which a program starts a Ray for all its runs: it must have room for who computes steps again."""
    plan = _plan(environment)
    if plan is None or config.strategy.strategy != "multi-worker-mirrored":
        return config
    return config.replace(workers=str(plan.workers))


def _plan(environment: Mapping[str, str]) -> ReplayPlan | None:
    text = environment.get(VARIABLE)
    return ReplayPlan(**json.loads(text)) if text else None


def check_other(run: Storage, environment: Mapping[str, str] = os.environ) -> None:
    """Do nothing where no step is computed again; else refuse to train a run that is not the one that is asked for.

    Raises:
        ConfigError: it has not finished.
        StorageError: storage refuses.
    """
    if is_asked(environment) and not run.exists(run_log.RESULT):
        raise ConfigError(
            f"the program trains {run.locate('')}, which has not finished, before it comes to the run whose steps are "
            "to be computed again. Give a command after `--` that trains that run, with the same --storage and --run."
        )


def settings(plan: ReplayPlan, config: TrainConfig) -> TrainConfig:
    """The settings with which steps are computed again: what is learned is the same.

    Raises:
        ConfigError: nobody can compute them again.
    """
    if config.strategy.strategy == "parameter-server":
        raise ConfigError(
            "steps of parameter servers depend on which worker comes first, so that none can be computed again. "
            "`raytf bisect` compares the losses of two runs."
        )
    changed = {name: value for name, value in _WITHOUT.items() if name in config.settings}
    if config.strategy.strategy == "multi-worker-mirrored":
        changed["workers"] = str(plan.workers)
    return config.replace(storage=plan.folder, run=RUN, **changed)
