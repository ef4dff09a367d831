"""A new run's model, tried before workers start: what is found, and what of it ends the run."""

from __future__ import annotations

import io
import types
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from raytf.config import precision
from raytf.config.train_config import TrainConfig
from raytf.data.plan import StepPlan
from raytf.data.sources import ArraySource
from raytf.driver.model_dry_run import Rehearsal, check_model, has_own_environment, is_busy, is_decisive, rehearsing
from raytf.errors import DataError, JobError, ModelError, RaytfError, RunMismatchError, WholeBatchError
from raytf.runs.display import Display
from raytf.training import model_probe
from raytf.training.job import TrainingJob, UserCode
from raytf.training.user.user_code import Parcel

MISTAKE = JobError("the model function raised TypeError", error=TypeError())
MISSING = JobError("the model function raised FileNotFoundError", error=FileNotFoundError())


@pytest.mark.parametrize(
    ("error", "has_gpus", "is_here", "is_told"),
    [
        (ModelError("the model has no loss"), False, False, True),
        (DataError("labels go from 0 to 5"), False, True, True),
        (MISTAKE, False, False, True),
        (MISSING, False, True, True),
        (MISSING, False, False, False),  # other machines may have the file
        (MISTAKE, True, True, False),  # a CPU may not do what a GPU does
        (WholeBatchError("whole batches"), False, True, False),  # which leads to other settings
    ],
)
def test_what_ends_a_run(error, has_gpus, is_here, is_told):
    assert is_decisive(error, has_gpus, is_here) is is_told

    class Asked:
        def answer(self, seconds: float) -> Any:
            raise error

    rehearsal = Rehearsal(Asked())  # type: ignore[arg-type]
    if is_told:
        with pytest.raises(type(error)):
            rehearsal.poll(print, has_gpus, is_here)
    rehearsal.poll(print, has_gpus, is_here)


@pytest.mark.parametrize(
    ("runtime_env", "is_own"),
    [
        ({}, False),
        ({"env_vars": {"A": "1"}, "working_dir": "gcs://x.zip"}, False),  # as a job of Ray has it, with its driver
        ({"env_vars": {"A": "2"}}, True),
        ({"env_vars": {"B": "1"}}, True),
        ({"pip": ["x"]}, True),
        ({"worker_process_setup_hook": "module.hook"}, True),
    ],
)
def test_workers_with_their_own_environment_may_do_what_this_one_cannot(runtime_env, is_own):
    assert has_own_environment(runtime_env, {"A": "1"}) is is_own


@pytest.mark.parametrize(
    ("load", "cpus", "busy"), [(0.0, 2, False), (3.0, 2, False), (3.1, 2, True), (12.0, 16, False)]
)
def test_a_busy_machine_tries_nothing(load, cpus, busy):
    assert is_busy(load, cpus) is busy


def model(loss: str = "sparse_categorical_crossentropy", width: int = 4):
    import keras

    made = keras.Sequential([keras.Input((width,)), keras.layers.Dense(3, activation="softmax")])
    made.compile("adam", loss)
    return made


def broken():
    raise TypeError("boom")


def of_its_node():
    import keras
    import ray

    class OfItsNode(keras.layers.Layer):
        def call(self, inputs):
            return inputs * float(len(ray.get_runtime_context().get_node_id()))

    made = keras.Sequential([keras.Input((4,)), OfItsNode(), keras.layers.Dense(3, activation="softmax")])
    made.compile("adam", "sparse_categorical_crossentropy")
    return made


def of_an_object():
    import ray

    return model(width=ray.get(ray.put(4)))


def of_rank_0():
    import raytf

    return model() if (raytf.rank(), raytf.size()) == (0, 1) else None


X, Y = np.zeros((64, 4), np.float32), np.arange(64) % 3


def a_job(make: Any) -> Any:
    return types.SimpleNamespace(
        code=Parcel(UserCode(make, None, None)),
        config=TrainConfig(),
        plan=StepPlan(64, 32, 4),
        class_weight=None,
        precision=precision.DEFAULT,
        settings=None,
    )


@pytest.mark.parametrize("make", [of_its_node, of_an_object])
def test_what_fails_for_want_of_ray_is_no_mistake(make, monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    with rehearsing(a_job(make), ArraySource(X, Y)) as rehearsal:
        asked = rehearsal._asked
        assert asked is not None
        assert "it uses Ray" in (asked.answer(300) or {})[model_probe.CANNOT]
        rehearsal.poll(print, False, True)


@pytest.mark.parametrize(
    ("make", "labels", "kind", "words"),
    [
        (model, Y, None, ""),
        (broken, Y, JobError, "the model function raised TypeError: boom"),
        (lambda: model("sparse_categorical_crosentropy"), Y, DataError, "Could not interpret loss identifier"),
        (lambda: model("mse"), np.zeros((64, 5), np.float32), DataError, "does not accept the labels"),
        (model, np.where(np.arange(64) == 63, 5, Y), DataError, "labels go from 0 to 5, but the model has 3 outputs"),
        (lambda: model(width=7), Y, RaytfError, "7"),
        (of_rank_0, Y, None, ""),
    ],
)
def test_a_mistake_is_found_in_another_process(make, labels, kind, words, monkeypatch):
    source = ArraySource(X, labels)
    job = a_job(make)
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    with rehearsing(job, source) as rehearsal:
        asked = rehearsal._asked
        assert asked is not None
        if kind is None:
            assert model_probe.CANNOT not in (asked.answer(300) or {})
            rehearsal.poll(print, False, True)
            return
        with pytest.raises(kind, match=words):
            asked.answer(300)
        with pytest.raises(kind):
            rehearsal.poll(print, False, True)


def dice():
    from keras import losses

    made = model()
    made.compile("adam", lambda y, p: losses.dice(y, p[:, :1]))
    return made


def test_a_loss_of_the_whole_batch_is_said_once_before_workers_say_it(monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (0.0, 0.0, 0.0))
    said = io.StringIO()
    display = Display(Console(file=said, width=300))
    with rehearsing(a_job(dice), ArraySource(X, Y.astype(np.float32))) as rehearsal:
        asked = rehearsal._asked
        assert asked is not None
        answer = asked.answer(300) or {}
        rehearsal.poll(display.say_early, False, True)
    line = answer[model_probe.REMARKS]
    assert line.startswith("WARNING: the loss looks at the whole batch")
    display.say(line)
    assert said.getvalue().count(line) == 1
    display.say(line)
    display.say_early(line)
    assert said.getvalue().count(line) == 2


STRUCTURE, OTHER = {"model structure": "aa", "other": "1"}, {"model structure": "bb", "other": "2"}


@pytest.mark.parametrize(
    ("before", "now", "is_refused"),
    [
        (STRUCTURE, STRUCTURE, False),
        (STRUCTURE, {**STRUCTURE, "other": "2"}, False),  # of which the workers decide
        (STRUCTURE, OTHER, True),
        ({**STRUCTURE, "model optimizer": "SGD"}, {**STRUCTURE, "model optimizer": "Adam"}, True),
        ({**STRUCTURE, "code of the model": "1"}, {**STRUCTURE, "code of the model": "2"}, False),
        ({}, OTHER, False),  # of a run that stored no model
        (STRUCTURE, {model_probe.CANNOT: "no module"}, False),
    ],
)
def test_a_run_that_had_finished_is_not_trained_further_with_another_model(tmp_path, before, now, is_refused):
    config = TrainConfig.of(run="mnist", storage=str(tmp_path))
    code = Parcel(UserCode(None))
    job = TrainingJob(code, config, None, None, str(tmp_path / "mnist"), StepPlan(8, 8, 1), 1, None, 1)
    if not is_refused:
        check_model(job, before, now)
        return
    with pytest.raises(RunMismatchError, match=r"another model: model .* in storage, .* now\. .*new=True"):
        check_model(job, before, now)
