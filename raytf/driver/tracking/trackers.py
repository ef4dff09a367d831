"""Experiment trackers (a file, TensorBoard, MLflow, Weights & Biases, callbacks), the numbers of committed steps and
epochs that they receive, and the last step that each has."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from raytf.checkpoint import manifest, naming
from raytf.checkpoint.manifest import CheckpointDocument
from raytf.config.objective import flat
from raytf.errors import ConfigError
from raytf.runs import run_log
from raytf.storage.storage import Storage
from raytf.training.job import TrainingJob, is_function

#: Names of trackers, which are also the names of the packages that they need.
PACKAGES = ("mlflow", "wandb", "tensorboard")
#: Suffix of a file's name.
FILE_SUFFIX = ".jsonl"
#: The tag by which a later start finds the run.
_KEY = "raytf.key"
#: Limits of MLflow: numbers and parameters in a request, and characters of a parameter's value.
_NUMBERS, _PARAMETERS, _CHARACTERS = 1000, 100, 500
#: TensorBoard's folder, below the run's folder.
FOLDER = "tensorboard/steps"
#: Packages whose callbacks report numbers.
_PACKAGES = ("aim", "clearml", "comet_ml", "dvclive", "mlflow", "neptune", "swanlab", "wandb")
#: Names of the numbers of each step, and of an epoch's mean loss.
LOSS, RATE, EPOCH_LOSS = "loss", "learning_rate", "epoch_loss"
#: Keys in an entry of the history that are not metrics.
_NO_METRICS = ("epoch", "step")
#: Name of the file in the run's folder.
FILE = "tracking.json"


@dataclass(frozen=True)
class Point:
    """Numbers of a global step (counted from 1): loss, learning rate, and at the end of an epoch its metrics."""

    step: int
    values: dict[str, float]


def committed(run: Storage) -> list[Point]:
    """Return the points of all steps up to the end of a finished run, or up to the newest checkpoint of another one."""
    result = run_log.read_result(run) or {}
    last, history = result.get("steps", 0), result.get("history", [])
    complete = manifest.list_complete(run)
    if complete and naming.split_name(complete[0])[0] > last:
        body = manifest.read(run, complete[0])
        last, history = body["step"], CheckpointDocument.parse(body["document"]).history
    steps = run_log.read_steps(run.uri)
    values = {
        int(step): {LOSS: float(loss), RATE: float(rate)}
        for step, loss, rate in zip(steps["step"], steps["loss"], steps["learning_rate"], strict=True)
        if step <= last
    }
    for entry in history:
        if entry.get("step", last + 1) <= last:
            values.setdefault(entry["step"], {}).update(_of_epoch(entry))
    return [Point(step, values[step]) for step in sorted(values)]


def _of_epoch(entry: Mapping[str, Any]) -> dict[str, float]:
    """Return the metrics of an epoch, renaming loss and learning rate, because each step has numbers so named."""
    names = {LOSS: EPOCH_LOSS, RATE: f"epoch_{RATE}"}
    return {names.get(name, name): float(value) for name, value in flat(entry).items() if name not in _NO_METRICS}


def unknown(points: Iterable[Point], last_steps: Mapping[str, int]) -> list[Point]:
    """Return the points in order, without the numbers up to the last step that a tracker already has of each."""
    new = [
        Point(point.step, {n: value for n, value in point.values.items() if point.step > last_steps.get(n, 0)})
        for point in points
    ]
    return [point for point in new if point.values]


@dataclass(frozen=True)
class Known:
    """The contents of `tracking.json`.

    Attributes:
        key: key by which trackers identify the run.
        complete: flags of the trackers that have received the whole run.
        heard: last global step that the program's own tracker callbacks have received.
    """

    key: str
    complete: tuple[str, ...] = ()
    heard: int = 0

    def write(self, run: Storage) -> None:
        run.put(FILE, json.dumps(dataclasses.asdict(self)).encode())


def read_known(run: Storage) -> Known:
    """Return the contents of a run's `tracking.json`. A new key is saved before a tracker receives it."""
    text = run.get_or_none(FILE)
    if text is None:
        known = Known(uuid.uuid4().hex)
        known.write(run)
        return known
    try:
        document = json.loads(text)
        return Known(str(document["key"]), tuple(map(str, document["complete"])), int(document.get("heard", 0)))
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{run.locate(FILE)} is damaged. Delete it; trackers will then show a new run.") from None


class Tracker(Protocol):
    """A tracker's run. Errors of the tracker's library are passed to the caller."""

    def open(self, key: str, name: str, parameters: Mapping[str, str]) -> None:
        """Open a run, or continue the run that an earlier start has opened.

        Args:
            key: unique key of the run, the same whenever the run is started again.
            name: name of the run, for people.
            parameters: settings of the run, by the names of their flags.
        """
        ...

    def last_steps(self, names: Iterable[str]) -> dict[str, int]:
        """Return the last step of each named number that the tracker has, without numbers unknown to it."""
        ...

    def tell(self, points: Sequence[Point]) -> None:
        """Send the numbers of further steps."""
        ...

    def keep(self, files: Mapping[str, bytes]) -> None:
        """Send files, by name. A tracker that accepts only numbers does nothing."""
        return

    def close(self, is_finished: bool) -> None:
        """Close the run, which can be opened again unless finished. A tracker that keeps nothing open does nothing."""
        return


@contextlib.contextmanager
def written(files: Mapping[str, bytes]) -> Iterator[list[str]]:
    """Write files to a temporary folder, for libraries that do not accept bytes, and yield their paths."""
    with tempfile.TemporaryDirectory(prefix="raytf-track-") as folder:
        for name, data in files.items():
            Path(folder, name).write_bytes(data)
        yield [os.path.join(folder, name) for name in files]


def check(track: str | None) -> None:
    """Raise a ConfigError if a tracker is unknown or not installed."""
    if track is None or track.endswith(FILE_SUFFIX):
        return
    if track not in PACKAGES:
        raise ConfigError(
            f"--track {track} is not known. Expected {', '.join(PACKAGES)}, or a file whose name ends with "
            f"{FILE_SUFFIX}."
        )
    if importlib.util.find_spec(track) is None:
        raise ConfigError(f"--track {track} needs {track}, which is not installed: pip install {track}")


class FileTracker(Tracker):
    """A file with a line for the run's settings, then lines {"run", "key", "step", and the numbers}."""

    def __init__(self, path: str):
        self._path = os.path.expanduser(path)
        self._key, self._name = "", ""
        self._known_steps: dict[str, int] = {}

    def open(self, key: str, name: str, parameters: Mapping[str, str]) -> None:
        self._key, self._name, is_new = key, name, True
        os.makedirs(os.path.dirname(os.path.abspath(self._path)), exist_ok=True)
        with open(self._path, "a+", encoding="utf-8") as file:
            file.seek(0)
            lines = file.read().splitlines(keepends=True)
            if lines and not lines[-1].endswith("\n"):  # from a process that was killed
                file.truncate(sum(len(line.encode()) for line in lines[:-1]))
                lines.pop()
            for number, line in enumerate(lines, 1):
                row = self._row(number, line)
                if row.pop("key", None) == key:
                    is_new = False
                    step = row.pop("step", 0)
                    self._known_steps.update(dict.fromkeys(row, step))
        if is_new:
            self._write([{"parameters": dict(parameters)}])

    def _row(self, number: int, line: str) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if not isinstance(row, dict):
            raise ConfigError(f"--track {self._path}: line {number} was not written by raytf. Choose another file.")
        return row

    def last_steps(self, names: Iterable[str]) -> dict[str, int]:
        return self._known_steps

    def tell(self, points: Sequence[Point]) -> None:
        self._write([{"step": point.step, **point.values} for point in points])

    def _write(self, rows: Sequence[Mapping[str, object]]) -> None:
        lines = [json.dumps({"run": self._name, "key": self._key, **row}) + "\n" for row in rows]
        with open(self._path, "a", encoding="utf-8") as file:
            file.write("".join(lines))


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
        runs = self._client.search_runs([experiment], f"tags.`{_KEY}` = '{key}'")
        if runs:
            self._run = runs[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            self._run = self._client.create_run(experiment, run_name=name, tags={_KEY: key}).info.run_id
        known = self._client.get_run(self._run).data.params  # MLflow does not allow changing these
        new = [Param(n, str(value)[:_CHARACTERS]) for n, value in parameters.items() if n not in known]
        for some in _batches(new, _PARAMETERS):
            self._client.log_batch(self._run, params=some)

    def _experiment(self) -> str:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if not name:
            return os.environ.get("MLFLOW_EXPERIMENT_ID") or "0"
        experiment = self._client.get_experiment_by_name(name)
        return experiment.experiment_id if experiment is not None else self._client.create_experiment(name)

    def last_steps(self, names: Iterable[str]) -> dict[str, int]:
        known = self._client.get_run(self._run).data.metrics
        history = {name: self._client.get_metric_history(self._run, name) for name in names if name in known}
        return {name: max(one.step for one in values) for name, values in history.items()}

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


def _batches(items: Sequence[Any], most: int) -> Iterator[Sequence[Any]]:
    return (items[i : i + most] for i in range(0, len(items), most))


class TensorBoardTracker(Tracker):
    """Scalars for TensorBoard, in the run's folder."""

    def __init__(self, run: Storage):
        self._run = run
        self._folder = tempfile.TemporaryDirectory(prefix="raytf-track-")
        self._writer: Any = None

    def open(self, key: str, name: str, parameters: Mapping[str, str]) -> None:
        from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        for old in self._run.list(FOLDER):
            self._run.delete(f"{FOLDER}/{old}")
        self._writer = EventFileWriter(self._folder.name)
        metadata = summary_pb2.SummaryMetadata(plugin_data=summary_pb2.SummaryMetadata.PluginData(plugin_name="text"))
        text = "\n".join(f"    {line}" for line in json.dumps(dict(parameters), indent=1).splitlines())
        tensor = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[text.encode()])
        self._add(0, summary_pb2.Summary.Value(tag="settings", metadata=metadata, tensor=tensor))

    def last_steps(self, names: Iterable[str]) -> dict[str, int]:
        return {}

    def tell(self, points: Sequence[Point]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        for point in points:
            self._add(point.step, *(Summary.Value(tag=n, simple_value=value) for n, value in point.values.items()))
        self._write()

    def _add(self, step: int, *values: Any) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2

        self._writer.add_event(
            event_pb2.Event(step=step, wall_time=time.time(), summary=summary_pb2.Summary(value=values))
        )

    def _write(self) -> None:
        self._writer.flush()
        for file in Path(self._folder.name).iterdir():
            self._run.put(f"{FOLDER}/{file.name}", file.read_bytes())

    def close(self, is_finished: bool) -> None:
        self._writer.close()
        self._folder.cleanup()


class WandbTracker:
    """A run of Weights & Biases."""

    def __init__(self) -> None:
        self._run: Any = None

    def open(self, key: str, name: str, parameters: Mapping[str, str]) -> None:
        import wandb

        # The program may have started another run itself.
        self._run = wandb.init(id=key, name=name, resume="allow", config=dict(parameters), reinit="create_new")

    def last_steps(self, names: Iterable[str]) -> dict[str, int]:
        # W&B accepts each step only once, and `step` is the next step.
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


# -- callback tracker --------------------------------------------------------------------------------------------------
#
# A worker has no active run of MLflow or W&B, and would call a callback again for steps that were lost. Tracker
# callbacks are therefore called in the driver, once for each committed step and each epoch.


def split(callbacks: Any, model: Any) -> tuple[Any, list[Any]]:
    """Return (callbacks for rank 0, callbacks of trackers).

    A tracker callback that saves the model stays on rank 0, because it needs the weights. If the model or the callbacks
    are a function, all callbacks run on rank 0.
    """
    if not isinstance(callbacks, list) or is_function(model):
        return callbacks, []
    theirs = [callback for callback in callbacks if _reports(type(callback))]
    return [callback for callback in callbacks if not _reports(type(callback))], theirs


def _reports(kind: type) -> bool:
    named = kind.__mro__[:-1]
    return any(base.__module__.partition(".")[0] in _PACKAGES for base in named) and not any(
        "Checkpoint" in base.__name__ for base in named
    )


class CallbackTracker(Tracker):
    """Calls the program's tracker callbacks, with the program's compiled model."""

    def __init__(self, run: Storage, callbacks: Sequence[Any], model: Any, job: TrainingJob):
        self._run, self._callbacks, self._model, self._job = run, callbacks, model, job
        #: The model's count of updates before the run. Callbacks read the current step from this count.
        self._before = 0
        self._epoch: int | None = None
        self._mlflow_run = ""

    def open(self, key: str, name: str, parameters: Mapping[str, str]) -> None:
        self._before = int(self._model.optimizer.iterations)
        for callback in self._callbacks:
            callback.set_params(self._job.params)
            callback.set_model(self._model)
        self._call("on_train_begin")
        active = _mlflow_run()
        self._mlflow_run = active.info.run_id if active is not None else ""

    def last_steps(self, names: Iterable[str]) -> dict[str, int]:
        return dict.fromkeys(names, read_known(self._run).heard)

    def tell(self, points: Sequence[Point]) -> None:
        if self._mlflow_run and _mlflow_run() is None:  # MLflow has an active run for each thread
            sys.modules["mlflow"].start_run(run_id=self._mlflow_run)
        heard = 0
        try:
            for point in points:
                self._tell(point)
                heard = point.step
        finally:  # so that a callback that failed is not called twice for the same step
            if heard:
                dataclasses.replace(read_known(self._run), heard=heard).write(self._run)

    def _tell(self, point: Point) -> None:
        self._model.optimizer.iterations.assign(self._before + point.step)
        epoch, batch = self._job.epoch_of(point.step - 1), self._job.plan.locate(point.step - 1)[1]
        if epoch != self._epoch:
            self._call("on_epoch_begin", epoch)
            self._epoch = epoch
        self._call("on_train_batch_begin", batch)
        self._call("on_train_batch_end", batch, {LOSS: point.values[LOSS]})
        if EPOCH_LOSS in point.values:
            self._call("on_epoch_end", epoch, _logs(point))

    def _call(self, hook: str, *args: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, hook)(*args)

    def close(self, is_finished: bool) -> None:
        self._model.optimizer.iterations.assign(self._before)  # the weights have not changed since the run started
        if is_finished:
            self._call("on_train_end")


def _logs(point: Point) -> dict[str, float]:
    """Return the metrics of an epoch by their Keras names."""
    metrics = {name: value for name, value in point.values.items() if name not in (LOSS, RATE, EPOCH_LOSS)}
    return {LOSS: point.values[EPOCH_LOSS], **metrics}


def _mlflow_run() -> Any:
    """Return the MLflow run that is active in this thread, or None."""
    mlflow = sys.modules.get("mlflow")
    return None if mlflow is None else mlflow.active_run()
