"""Learning-rate scaling and warm-up as laws: functions of the configuration and the step, and of nothing else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raytf.config.flags import RateSection
from raytf.config.identity import batch_identity
from raytf.config.train_config import TrainConfig
from raytf.errors import ConfigError
from raytf.training.step.learning_rate import RateLaw, law

LAWS = st.builds(RateLaw, st.floats(0.01, 100), st.integers(0, 1000))


@pytest.mark.parametrize(
    ("flags", "factor", "steps"),
    [
        ({"scale_learning_rate": "linear"}, 8.0, 0),
        ({"scale_learning_rate": "linear", "base_batch_size": 256}, 4.0, 0),
        ({"scale_learning_rate": "linear", "base_batch_size": 4096}, 0.25, 0),
        ({"scale_learning_rate": "sqrt", "base_batch_size": 256}, 2.0, 0),
        ({"warmup_epochs": 5}, 1.0, 60),
        ({"scale_learning_rate": "linear", "warmup_epochs": 0.5}, 8.0, 6),
    ],
)
def test_the_factor_is_that_of_the_global_batch(flags: dict, factor: float, steps: int):
    assert law(RateSection(**flags), 1024, steps_per_epoch=12) == RateLaw(factor, steps)


@pytest.mark.parametrize(
    "flags", [{}, {"scale_learning_rate": "linear", "base_batch_size": 1024}, {"base_batch_size": 7}]
)
def test_there_is_no_law_where_nothing_changes(flags: dict):
    assert law(RateSection(**flags), 1024, steps_per_epoch=12) is None


@given(LAWS, st.integers(0, 2000))
def test_a_warm_up_rises_to_the_full_rate_and_stays(rate: RateLaw, step: int):
    assert 0 < rate.share(step) <= 1
    assert rate.share(step) <= rate.share(step + 1)
    if step + 1 >= rate.warmup_steps:
        assert rate.share(step) == 1
    else:
        assert rate.share(step) > rate.begin


@given(LAWS)
def test_a_warm_up_begins_at_the_rate_of_the_model_where_that_is_scaled_up(rate: RateLaw):
    assert rate.begin * rate.factor == pytest.approx(1 if rate.factor > 1 else 0)


@given(st.integers(1, 64), st.sampled_from(["none", "linear", "sqrt"]), st.floats(0, 10))
def test_no_number_of_workers_appears_in_it(workers: int, scaling: str, epochs: float):
    flags = {"scale_learning_rate": scaling, "warmup_epochs": epochs, "global_batch_size": 1024, "logical_shards": 64}
    one, many = TrainConfig.of(workers="1", **flags), TrainConfig.of(workers=str(workers), **flags)
    assert law(one.rate, 1024, 10) == law(many.rate, 1024, 10)
    assert batch_identity(one, 999) == batch_identity(many, 999)


def test_only_flags_that_were_given_are_part_of_the_identity():
    without = batch_identity(TrainConfig(), 999)
    assert not [key for key in without if "rate" in key or "warmup" in key or "base" in key]
    assert batch_identity(TrainConfig.of(base_batch_size=7), 999) == without
    given_flags = {"scale_learning_rate": "linear", "base_batch_size": 32, "warmup_epochs": 2}
    assert batch_identity(TrainConfig.of(**given_flags), 999) == without | {
        "--scale-learning-rate": "linear from --base-batch-size 32",
        "--warmup-epochs": "2",
    }


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"scale_learning_rate": "cubic"}, ["scale_learning_rate='cubic'", "none, linear, sqrt"]),
        ({"base_batch_size": 0}, ["base_batch_size=0", "1 or more"]),
        ({"warmup_epochs": -1.0}, ["warmup_epochs=-1.0", "0 or more"]),
        ({"warmup_epochs": float("nan")}, ["warmup_epochs=nan"]),
        ({"warmup_epochs": float("inf")}, ["warmup_epochs=inf"]),
    ],
)
def test_what_cannot_work_is_refused(flags: dict, words: list[str]):
    with pytest.raises(ConfigError) as caught:
        TrainConfig.of(**flags).check()
    for word in words:
        assert word in str(caught.value)
