"""MLflow, where its own settings say that it is (MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME)."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from raytf.driver.tracking.points import Point
from raytf.driver.tracking.tracker import written

#: The tag by which a later start finds the run.
_KEY = "raytf.key"
#: Numbers and parameters in a request, which MLflow limits to 1,000 and 100, and characters of a parameter's value.
_NUMBERS, _PARAMETERS, _CHARACTERS = 1000, 100, 500


class MlflowTracker:
    """A run of MLflow."""

    def __init__(self) -> None:
        self._client: Any = None
        self._run = ""

    def open(self, key: str, name: str, parameters: Mapping[str, str]) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
        experiment = self._experiment()
        found = self._client.search_runs([experiment], f"tags.`{_KEY}` = '{key}'")
        if found:
            self._run = found[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            self._run = self._client.create_run(experiment, run_name=name, tags={_KEY: key}).info.run_id
        known = self._client.get_run(self._run).data.params  # which cannot be changed
        new = [Param(n, str(value)[:_CHARACTERS]) for n, value in parameters.items() if n not in known]
        for some in _batches(new, _PARAMETERS):
            self._client.log_batch(self._run, params=some)

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if not name:
            return os.environ.get("MLFLOW_EXPERIMENT_ID") or "0"
        found = self._client.get_experiment_by_name(name)
        return found.experiment_id if found is not None else self._client.create_experiment(name)

    def told(self, names: Iterable[str]) -> dict[str, int]:
        known = self._client.get_run(self._run).data.metrics
        history = {name: self._client.get_metric_history(self._run, name) for name in names if name in known}
        return {name: max(one.step for one in found) for name, found in history.items()}

    def tell(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        numbers = [Metric(name, value, now, p.step) for p in points for name, value in p.values.items()]
        for some in _batches(numbers, _NUMBERS):
            self._client.log_batch(self._run, metrics=some)

    def keep(self, files: Mapping[str, bytes]) -> None:
        with written(files) as paths:
            for path in paths:
                self._client.log_artifact(self._run, path)

    def close(self, is_finished: bool) -> None:
        self._client.set_terminated(self._run, "FINISHED" if is_finished else "KILLED")


def _batches(things: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (things[i : i + most] for i in range(0, len(things), most))
