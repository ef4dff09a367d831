"""Weights & Biases, where its own settings say that it is (WANDB_PROJECT, WANDB_MODE)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from raytf.driver.tracking.points import Point
from raytf.driver.tracking.tracker import written


class WandbTracker:
    """A run of Weights & Biases."""

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, key: str, name: str, parameters: Mapping[str, str]) -> None:
        import wandb

        # Beside a run that the program may have begun itself.
        self._run = wandb.init(id=key, name=name, resume="allow", config=dict(parameters), reinit="create_new")

    def told(self, names: Iterable[str]) -> dict[str, int]:
        # It takes no step twice, and `step` is the next one.
        return dict.fromkeys(names, self._run.step - 1) if self._run.resumed else {}

    def tell(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log(point.values, step=point.step)

    def keep(self, files: Mapping[str, bytes]) -> None:
        import wandb

        with written(files) as paths:
            made = wandb.Artifact(f"run-{self._run.id}", type="run")
            for path in paths:
                made.add_file(path, policy="mutable")
            self._run.log_artifact(made)

    def close(self, is_finished: bool) -> None:
        self._run.finish(exit_code=0 if is_finished else 1)
