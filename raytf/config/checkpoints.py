"""The settings of checkpoints; as in `raytf.config.sections`, field names are the flags."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge

from raytf.config.setting import Usual
from raytf.config.strategies import not_with_servers


@dataclass(frozen=True)
class CheckpointSection:
    """When checkpoints are written and how many stay."""

    checkpoint_every_steps: Annotated[int | None, Ge(1), Usual()] = None
    """Save after this many steps."""
    checkpoint_every_seconds: Annotated[float | None, Ge(0), Usual()] = None
    """Save after this many seconds (default 30 when --checkpoint-every-steps is not given either); the first steps of a
    run, and those after a restart, are saved sooner."""
    snapshot_every_steps: Annotated[
        int | None,
        Ge(0),
        not_with_servers(
            "the state lives on the servers, and is copied to storage alone; --checkpoint-every-steps says when",
            unless=(0,),
        ),
    ] = None
    """Copy the state into the memory of the run's nodes after this many steps, so that a failure costs few steps; 0
    never does. The default is as often as takes less than 1 % of the time."""
    keep: Annotated[int, Ge(1)] = 3
    """How many of the newest complete checkpoints are kept."""
    keep_best: str | None = None
    """Also keep the checkpoint of the epoch with the best value of a metric, such as val_accuracy or max:val_mine."""
