"""A dtype policy that a job has set is that of its model, on every rank, and of no other job's."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers

from raytf.config import precision
from raytf.config.flags import ComputeSection
from raytf.config.precision import Precision
from raytf.errors import ConfigError
from raytf.training.model.model import build

X = np.random.default_rng(0).normal(size=(4, 6)).astype("float32")
SAMPLE = (X, X[:, :1], None)


def dense(**options):
    model = keras.Sequential([keras.Input((6,)), layers.Dense(4, **options), layers.Dense(1, dtype="float32")])
    model.compile("sgd", "mse")
    return model


def made(flag=None, own=precision.DEFAULT, factory=dense):
    said: list[str] = []
    return build(factory, SAMPLE, [], ComputeSection(mixed_precision=flag), 0, said.append, own), said


@pytest.fixture(autouse=True)
def _as_before():
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def test_what_the_driver_has_set_is_what_the_model_function_finds():
    assert precision.of_process() == precision.DEFAULT
    keras.config.set_dtype_policy("mixed_bfloat16")
    own = precision.of_process()
    assert own == Precision("mixed_bfloat16")
    model, said = made(own=own)
    assert model.layers[0].compute_dtype == "bfloat16"
    assert said == ["dtype policy, as the job has set it: float32, mixed_bfloat16"]
    model, said = made()  # the next job in this process, which has set nothing
    assert model.layers[0].compute_dtype == "float32"
    assert said == []


def test_a_policy_of_float16_scales_the_loss_as_the_flag_does():
    for model, _ in (made("float16"), made(own=Precision("mixed_float16"))):
        assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        assert model.layers[0].compute_dtype == "float16"


def test_floatx_and_the_policy_of_a_layer_hold():
    model, said = made(own=Precision("float64", "float64"))
    assert model.layers[0].variable_dtype == "float64"
    assert said == ["dtype policy, as the job has set it: float32, float64"]
    model, said = made(factory=lambda: dense(dtype="mixed_bfloat16"))
    assert model.layers[0].compute_dtype == "bfloat16"
    assert said == ["dtype policy, as the job has set it: float32, mixed_bfloat16"]


def sets(policy):
    def factory():
        keras.config.set_dtype_policy(policy)
        return dense()

    return factory


def test_a_model_function_that_contradicts_the_flag_is_refused():
    model, _ = made(factory=sets("mixed_bfloat16"))
    assert model.layers[0].compute_dtype == "bfloat16"
    assert made("bfloat16", factory=sets("mixed_bfloat16"))[0].layers[0].compute_dtype == "bfloat16"
    for flag, factory in (
        ("off", sets("mixed_bfloat16")),
        ("float16", sets("mixed_bfloat16")),
        ("bfloat16", sets("float32")),
        ("off", lambda: dense(dtype="mixed_float16")),
    ):
        with pytest.raises(ConfigError, match=f"--mixed-precision {flag}, but"):
            made(flag, factory=factory)


def test_looking_at_a_process_sets_nothing():
    keras.utils.clear_session()
    assert precision.of_process() == precision.DEFAULT
    keras.config.set_floatx("float64")
    assert precision.of_process() == Precision("float64", "float64")
