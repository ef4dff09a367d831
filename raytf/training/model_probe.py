"""Builds the job's model in another process, on the CPU, to describe it or to try a step.

Another process is needed because the driver must not import TensorFlow or change the state of Keras in a notebook.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import resource
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

from raytf.data.sources import Source
from raytf.distributed import ranks
from raytf.distributed.ranks import RankInfo
from raytf.errors import RaytfError, one_line
from raytf.training import run_identity
from raytf.training.job import TrainingJob
from raytf.training.user import user_code

#: Keys of an answer: the model's configuration, lines for the user, and the reason why it cannot be built here.
CONFIG, REMARKS, CANNOT = "config of the model", "remarks", "cannot"
#: Limit of the process's memory: a share of the free memory, but at least what TensorFlow needs for itself.
_MEMORY_SHARE, _LEAST_BYTES = 0.25, 4 << 30
#: If the machine runs out of memory, the kernel kills this process first.
_OOM_SCORE = "1000"


class ModelProbe:
    """A process that builds the job's model; see `started`.

    Args:
        process: the process; None if it could not be started.
        answer: path of the file to which the process writes its answer.
        why: why the process could not be started.
    """

    def __init__(self, process: subprocess.Popen[bytes] | None, answer: Path, why: str = ""):
        self._process, self._answer, self._why = process, answer, why

    def answer(self, seconds: float) -> dict[str, str] | None:
        """Wait for the answer.

        Args:
            seconds: the longest time to wait.

        Returns:
            The model's part of the run's identity, and its configuration under `CONFIG`. If a step was tried, also the
            lines that a worker would print, under `REMARKS`. If no process here can build the model, only the reason,
            under `CANNOT`. None if there is no answer yet.

        Raises:
            RaytfError: the model function raised an error, or returned a model that cannot be trained.
        """
        if self._process is None:
            return {CANNOT: self._why}
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        if not self._answer.exists():
            return {CANNOT: "the process that builds it exited without a result"}
        answer: Any = ray.cloudpickle.loads(self._answer.read_bytes())
        if isinstance(answer, RaytfError):
            raise answer
        return answer


@contextlib.contextmanager
def started(job: TrainingJob, train: Source, rows: int, trains: bool = False) -> Iterator[ModelProbe]:
    """Start a process that builds the job's model, and kill it at the end of the `with` block.

    Args:
        job: the job with the model.
        train: the training data.
        rows: number of the first records with which the model is built.
        trains: whether to compute a step with these records, too.
    """
    leaves = train.take(np.arange(min(rows, train.records)))
    config = job.config
    question = {
        "code": job.code,
        "records": (job.plan.micro_batch_size, job.plan.global_batch_size),
        "sample": _FirstRecords(
            len(leaves[0]), train.spec, leaves, train.label_range() if trains else None, train.name
        ),
        "compute": config.compute,
        "batch_section": config.batch,
        "class_weight": job.class_weight,
        "precision": job.precision,
        "settings": job.settings,
        "trains": trains,
    }
    with tempfile.TemporaryDirectory(prefix="raytf-model-") as folder:
        question_file, answer = Path(folder) / "question", Path(folder) / "answer"
        try:
            question_file.write_bytes(ray.cloudpickle.dumps(question))
        except Exception as error:
            yield ModelProbe(None, answer, f"it cannot be sent to another process ({one_line(error, 200)})")
            return
        environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
        environ["RAY_ENABLE_AUTO_CONNECT"] = "0"  # a model that uses Ray must not start a cluster here
        environ.pop("TF_CONFIG", None)
        process = subprocess.Popen(
            [sys.executable, "-m", "raytf.training.model_probe", str(question_file), str(answer), *map(str, sys.path)],
            env=environ, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            yield ModelProbe(process, answer)
        finally:
            process.kill()
            process.wait()


@dataclass(frozen=True)
class _FirstRecords:
    """A source with only the first records of another source."""

    records: int
    spec: Any
    leaves: list[np.ndarray]
    labels: tuple[float, float] | None
    name: str
    block_sizes: None = None
    window: int = 1

    def take(self, records: np.ndarray) -> list[np.ndarray]:
        return [leaf[records] for leaf in self.leaves]

    def label_range(self) -> tuple[float, float] | None:
        return self.labels


def _main(question: str, answer: str, *path: str) -> None:
    """Build the model; runs in the separate process.

    Args:
        question: path of the pickled job.
        answer: path of the file for the description or the error.
        path: the driver's `sys.path`, which contains the job's modules.
    """
    sys.path[:] = [*path, *(folder for folder in sys.path if folder not in path)]
    ranks.take(RankInfo(0, 1, 0, 1))
    try:
        asked = ray.cloudpickle.loads(Path(question).read_bytes())
        if asked["trains"]:
            _yield_memory()
        result: Any = _described(asked)
    except ImportError as error:
        result = {CANNOT: one_line(error, 200)}
    except RaytfError as error:
        if asks_ray(error):
            result = {CANNOT: f"it uses Ray, which is not available there: {one_line(error, 200)}"}
        else:
            result = user_code.carrying(error)
            error.__cause__ = None  # its class may be unknown to the driver
    Path(f"{answer}.part").write_bytes(ray.cloudpickle.dumps(result))
    os.replace(f"{answer}.part", answer)


def asks_ray(error: BaseException) -> bool:
    """Return whether Ray raised an error, perhaps because this process, unlike a worker, has no cluster."""
    inside, without = (Path(inspect.getfile(module)).parent for module in (ray, ray.cloudpickle))
    waiting: list[BaseException | None] = [error]
    seen: list[BaseException] = []
    while waiting:
        one = waiting.pop()
        if one is None or any(one is other for other in seen):
            continue
        seen.append(one)
        waiting += [one.__cause__, one.__context__]
        files = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(one.__traceback__)]
        if any(file.is_relative_to(inside) and not file.is_relative_to(without) for file in files):
            return True
    return False


def _yield_memory() -> None:
    """Limit this process's memory: a model for GPUs may be too large for this machine, and training needs memory."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text(_OOM_SCORE)
    most = max(_LEAST_BYTES, int(_MEMORY_SHARE * psutil.virtual_memory().available))
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _described(asked: dict[str, Any]) -> dict[str, str]:
    from raytf import _process

    _process.load_tensorflow()
    from raytf.data.pipeline import Pipeline
    from raytf.data.plan import StepPlan
    from raytf.training.model import model as models
    from raytf.training.model.notes import notes_of
    from raytf.training.user.callbacks import foreseen

    if asked["settings"] is not None:
        asked["settings"].apply()
    source, code = asked["sample"], asked["code"].get()
    # A trial step has a single shard.
    plan = StepPlan(source.records, source.records if asked["trains"] else 1, 1)
    seed, weights = asked["batch_section"].seed, asked["class_weight"]
    pipeline = Pipeline(source, plan, range(1), seed, class_weight=weights, augment=code.augment)
    try:
        model = models.build(
            code.make,
            pipeline.sample(models.SAMPLE),
            [source] if asked["trains"] else [],
            asked["compute"],
            seed,
            lambda line: None,
            asked["precision"],
            asked["records"],
        )
        if asked["trains"]:
            notes_of(model).remarks += foreseen(code.callbacks)
            _train(model, pipeline)
    finally:
        pipeline.close()
    described = run_identity.of_model(models.describe(model), models.code(model, (code.augment,)))
    lines = {REMARKS: "\n".join(notes_of(model).take_remarks())} if asked["trains"] else {}
    return described | lines | {CONFIG: models.config_text(model)}


def _train(model: Any, pipeline: Any) -> None:
    """Compute a step like the only worker of a run."""
    import tensorflow as tf

    from raytf.checkpoint.variables import seed_states
    from raytf.errors import JobError
    from raytf.inference.user_model import own_traceback
    from raytf.training.model import model as models
    from raytf.training.step.step import StepOptions, TrainStep

    pipeline.prepare(len(seed_states(model)), models.sparse_classes(model))
    leaves = pipeline.template, pipeline.leaf_specs
    try:
        step = TrainStep(model, pipeline.plan, pipeline.shards, None, *leaves, StepOptions())
        step(pipeline.submit(0, 1).result(), np.zeros(1, np.float32))
    except RaytfError:
        raise
    except tf.errors.OpError as error:
        raise JobError(f"training raised {type(error).__name__}: {one_line(error, 500)}") from error
    except Exception as error:
        message = f"training raised {type(error).__name__}: {one_line(error, 500)}"
        raise JobError(message, own_traceback(error), error) from error


if __name__ == "__main__":
    from raytf.training import model_probe  # so that pickled classes belong to this module and not to __main__

    model_probe._main(*sys.argv[1:])
