"""Variables that the step reads, and that belong to neither the model nor its optimizer."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from ray import cloudpickle

from raytf.checkpoint import variables
from raytf.data.pipeline import Pipeline
from raytf.data.plan import StepPlan
from raytf.data.sources import ArraySource
from raytf.errors import ModelError
from raytf.storage.storage import Storage
from raytf.training.model import program_variables
from raytf.training.step.step import StepOptions, TrainStep
from raytf.training.user.user_code import Parcel

SHARDS = 2


def model(loss) -> keras.Model:
    keras.utils.set_random_seed(1)
    made = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    made.compile("sgd", loss)
    made.optimizer.build(made.trainable_variables)
    return made


def step_of(made: keras.Model) -> TrainStep:
    draw = np.random.default_rng(0)
    x, plan = draw.normal(size=(32, 3)).astype(np.float32), StepPlan(32, 8, SHARDS)
    pipeline = Pipeline(ArraySource(x, x[:, :1]), plan, range(SHARDS), seed=0, shuffle=False)
    pipeline.prepare(1, None)
    options = StepOptions(flags=1, fixed_point=True)
    return TrainStep(made, plan, range(SHARDS), None, pipeline.template, pipeline.leaf_specs, options)


def found_in(made: keras.Model, step: TrainStep) -> list[program_variables.ProgramVariable]:
    known = [*made.variables, *variables.variables(made).values(), *step.reduction_state().values()]
    return program_variables.find(step.probe_function, [*known, *variables.seed_states(made)])


def test_what_a_loss_reads_is_found_in_the_order_in_which_it_is_read():
    slope, bias = keras.Variable(2.0, name="slope"), tf.Variable(1.0, name="bias")
    made = model(lambda t, p: keras.ops.mean((t - p) ** 2, -1) * slope + tf.cond(bias > 0, lambda: bias, lambda: 0.0))
    found = found_in(made, step_of(made))
    assert [each.name for each in found] == ["slope", "bias"]
    assert [each.numpy() for each in found] == [2.0, 1.0]
    found[1].assign(3.0)
    assert bias.numpy() == 3.0
    variables.keep_program(made, found)
    assert list(variables.variables(made))[-2:] == ["program/00000/slope", "program/00001/bias"]


def test_a_model_that_reads_only_its_own_has_none():
    made = model("mse")
    assert found_in(made, step_of(made)) == []


@pytest.mark.parametrize("kind", [keras.Variable, tf.Variable])
def test_a_step_that_writes_one_is_refused(kind):
    count = kind(0.0, name="count")

    def loss(t, p):
        count.assign_add(1.0)
        return keras.ops.mean((t - p) ** 2, -1) * (count + 1.0)

    made = model(loss)
    with pytest.raises(ModelError, match=r"changes .*count.* which is not the model's"):
        found_in(made, step_of(made))


def test_the_program_gets_the_values_that_they_had_in_the_end(tmp_path):
    weights = {"first": keras.Variable(1.0), "second": tf.Variable([1.0, 2.0])}
    parcel = Parcel(lambda t, p: t * weights["first"] + weights["second"])
    theirs = cloudpickle.loads(cloudpickle.dumps(parcel))
    first, second = theirs.variables()
    assert (first is not weights["first"], second.numpy().tolist()) == (True, [1.0, 2.0])
    first.assign(5.0)
    second.assign([6.0, 7.0])
    made, run = model("mse"), Storage(str(tmp_path))
    variables.keep_program(made, [program_variables.ProgramVariable(each) for each in (first.value, second)])
    program_variables.keep(run, made, theirs)
    program_variables.give_back(run, parcel)
    assert weights["first"].numpy() == 5.0
    assert weights["second"].numpy().tolist() == [6.0, 7.0]
