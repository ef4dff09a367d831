"""Checks that the result of a finished run applies to what is asked for now: same settings, same data, same model.

Settings and data are compared in the driver. The model is built in a separate process, on the CPU, as a worker builds
it: the driver must not import TensorFlow, and the state of Keras in a notebook must not change.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray

from raytf.config import canonical_text
from raytf.data.sources import Source
from raytf.errors import JobError, RaytfError, RunMismatchError, StorageError, one_line
from raytf.storage.storage import Storage
from raytf.training import run_identity
from raytf.training.job import Sources, TrainingJob

#: Timeout for importing TensorFlow and building the model, on a busy machine.
_SECONDS = 600
#: Number of records with which a worker builds its model.
_SAMPLE = 2
#: File in the run's folder with the configuration of its model, from which a message can say where models differ.
_ARCHITECTURE = "architecture.json"
#: Key of the current model's configuration in the answer of the process that builds it.
_CONFIG = "config of the model"


def stored(result: Mapping[str, Any]) -> dict[str, str]:
    """The identity that a run stored in its result; empty if there is none, or if it is not a mapping."""
    found = result.get("identity")
    return {str(k): str(v) for k, v in found.items()} if isinstance(found, dict) else {}


def compare(job: TrainingJob, sources: Sources, before: Mapping[str, str], say: Callable[[str], None]) -> None:
    """Refuse the result of a run that had other settings, another model or other data.

    Args:
        job: what is asked for now, not sent to any worker yet.
        sources: its data.
        before: the identity that the run stored.
        say: called with a line about what could not be compared.

    Raises:
        RunMismatchError: names what differs.
        RaytfError: the model cannot be built.
    """
    if not before:
        say("the run stored nothing about its settings, data and model, so they were not compared")
        return
    now = run_identity.of_run(job, sources)
    now = _without_varying_data(before, now, sources)
    _refuse(job, before, now)
    missing = [key for key in (run_identity.STRUCTURE, *run_identity.DATA, run_identity.CODE) if key not in before]
    if missing:
        say(f"this run was made by an older raytf, which did not store {', '.join(missing)}: these were not compared")
    described = describe(job, sources.train)
    if "cannot" in described:
        say(f"the model was not compared: {described['cannot']}")
        return
    config = described.pop(_CONFIG, "")
    where = ""
    if described[run_identity.STRUCTURE] != before.get(run_identity.STRUCTURE, described[run_identity.STRUCTURE]):
        where = _first_difference(Storage(job.run_uri), config)
    _refuse(job, before, now | described, where)


def _refuse(job: TrainingJob, before: Mapping[str, str], now: Mapping[str, str], where: str = "") -> None:
    model = ("model ", run_identity.CODE)
    known = {
        key: value for key, value in before.items() if key in now or not key.startswith((*model, *run_identity.DATA))
    }
    difference = run_identity.not_answered({k: v for k, v in known.items() if k in now or k != "training data"}, now)
    if difference:
        raise RunMismatchError(
            f"run {job.config.run.run!r} has finished with other settings, so its result does not apply: "
            f"{where}{difference}. Use the same settings as before, or choose another --run name."
        )


def _first_difference(run: Storage, config: str) -> str:
    """Describe the first difference between the run's model and the current one; empty if Keras could not serialize
    both."""
    try:
        stored = json.loads(run.get_or_none(_ARCHITECTURE) or b"{}").get("config")
        found = canonical_text.first_difference(canonical_text.canonical(stored, False), json.loads(config or "null"))
    except (StorageError, ValueError, RecursionError, AttributeError, TypeError):
        return ""  # then the message says only that they differ
    return f"{found}; " if found and stored and config else ""


def _without_varying_data(before: Mapping[str, str], now: dict[str, str], sources: Sources) -> dict[str, str]:
    """Drop data that change each time they are read: they cannot be compared."""
    found = dict(now)
    for key, name in run_identity.DATA.items():
        source = getattr(sources, name)
        if source is not None and before.get(key, now[key]) != now[key] and run_identity.contents(source) != now[key]:
            found = {k: v for k, v in found.items() if k != key and not (name == "train" and k == "training data")}
    return found


def describe(job: TrainingJob, train: Source) -> dict[str, str]:
    """Build the job's model in another process and describe it.

    Returns:
        What a run stores about its model, and its configuration under `_CONFIG`. If no process here can build the
        model, only `cannot`, with the reason.

    Raises:
        RaytfError: the function raised, or returned a model that cannot be trained.
    """
    leaves = train.take(np.arange(min(_SAMPLE, train.records)))
    config = job.config
    asked = {
        "code": job.code,
        "records": job.plan.micro_batch_size,
        "sample": _FirstRecords(len(leaves[0]), train.spec, leaves),
        "compute": config.compute,
        "batch_section": config.batch,
        "class_weight": job.class_weight,
        "precision": job.precision,
    }
    with tempfile.TemporaryDirectory(prefix="raytf-model-") as folder:
        question, answer = Path(folder) / "question", Path(folder) / "answer"
        try:
            question.write_bytes(ray.cloudpickle.dumps(asked))
        except Exception as error:
            return {"cannot": f"it cannot be sent to another process ({one_line(error, 200)})"}
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
        environ.pop("TF_CONFIG", None)
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [sys.executable, "-m", "raytf.training.finished_run", str(question), str(answer), *map(str, sys.path)],
                env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                timeout=_SECONDS, check=False,
            )  # fmt: skip
        if not answer.exists():
            return {"cannot": f"the process that builds it ended without a result, or took more than {_SECONDS} s"}
        said: Any = ray.cloudpickle.loads(answer.read_bytes())
    if isinstance(said, JobError):
        raise JobError(
            f"this run has finished, and the current model, with which it is compared, cannot be built: {said}",
            said.traceback,
        )
    if isinstance(said, RaytfError):
        raise said
    return said


@dataclass(frozen=True)
class _FirstRecords:
    """The first records of a source, as a source of their own."""

    records: int
    spec: Any
    leaves: list[np.ndarray]
    name: str = "sample"
    block_sizes: None = None
    window: int = 1

    def take(self, records: np.ndarray) -> list[np.ndarray]:
        return [leaf[records] for leaf in self.leaves]

    def label_range(self) -> None:
        return None


def _main(question: str, answer: str, *path: str) -> None:
    """Build the model and describe it; runs in the separate process.

    Args:
        question: path of the pickled job.
        answer: path to which the description is written, or the error.
        path: the driver's `sys.path`, where the job's modules are found.
    """
    sys.path[:] = [*path, *(folder for folder in sys.path if folder not in path)]
    try:
        said: Any = _described(ray.cloudpickle.loads(Path(question).read_bytes()))
    except ImportError as error:
        said = {"cannot": one_line(error, 200)}
    except RaytfError as error:
        error.__cause__ = None  # its class may be unknown to the driver
        said = error
    Path(f"{answer}.part").write_bytes(ray.cloudpickle.dumps(said))
    os.replace(f"{answer}.part", answer)


def _described(asked: dict[str, Any]) -> dict[str, str]:
    from raytf import _process

    _process.load_tensorflow()
    from raytf.data.pipeline import Pipeline
    from raytf.data.plan import StepPlan
    from raytf.training import model as models

    source, code = asked["sample"], asked["code"].get()
    pipeline = Pipeline(
        source,
        StepPlan(source.records, 1, 1),
        range(1),
        asked["batch_section"].seed,
        class_weight=asked["class_weight"],
        augment=code.augment,
    )
    try:
        model = models.build(
            code.make,
            pipeline.sample(),
            [],
            asked["compute"],
            asked["batch_section"].seed,
            lambda line: None,
            asked["precision"],
            (asked["records"], asked["records"]),
        )
    finally:
        pipeline.close()
    described = run_identity.of_model(models.describe(model), models.code(model, (code.augment,)))
    return described | {_CONFIG: models.config_text(model)}


if __name__ == "__main__":
    from raytf.training import finished_run  # so that pickled classes belong to this module and not to __main__

    finished_run._main(*sys.argv[1:])
