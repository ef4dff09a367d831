"""What a job has set in Keras, and the flag: who decides, and what contradicts."""

from __future__ import annotations

import dataclasses

import pytest

from raytf.config import precision
from raytf.config.identity import batch_identity
from raytf.config.precision import Precision
from raytf.config.train_config import TrainConfig
from raytf.errors import ConfigError

NONE, BF16, F16, F64 = (Precision(p, x) for p, x in (
    ("float32", "float32"), ("mixed_bfloat16", "float32"), ("mixed_float16", "float32"), ("float64", "float64"),
))  # fmt: skip


@pytest.mark.parametrize(
    ("flag", "own", "policy"),
    [
        (None, NONE, "float32"),
        (None, BF16, "mixed_bfloat16"),
        (None, F16, "mixed_float16"),
        (None, F64, "float64"),
        ("off", NONE, "float32"),
        ("off", F64, "float64"),
        ("off", BF16, None),
        ("bfloat16", NONE, "mixed_bfloat16"),
        ("bfloat16", BF16, "mixed_bfloat16"),
        ("bfloat16", F16, None),
        ("bfloat16", F64, None),
        ("float16", NONE, "mixed_float16"),
        ("float16", Precision("float16"), None),
    ],
)
def test_without_a_flag_the_job_decides_and_a_contradiction_is_refused(flag, own, policy):
    if policy is None:
        with pytest.raises(
            ConfigError, match=f"--mixed-precision {flag}, but the job has set the dtype policy {own.policy}"
        ):
            precision.choose(flag, own)
    else:
        assert precision.choose(flag, own) == dataclasses.replace(own, policy=policy)


@pytest.mark.parametrize(
    ("flag", "after", "layers", "said"),
    [
        (None, F16, ["mixed_bfloat16"], None),
        ("off", NONE, ["float32", "float64"], None),
        ("off", BF16, [], "model function has set the dtype policy mixed_bfloat16"),
        ("off", NONE, ["mixed_float16"], "layers of dtype policy mixed_float16"),
        ("bfloat16", BF16, ["float32", "mixed_bfloat16"], None),
        ("bfloat16", NONE, [], "model function has set the dtype policy float32"),
        ("float16", F16, ["mixed_bfloat16"], "layers of dtype policy mixed_bfloat16"),
    ],
)
def test_what_the_model_function_has_made_must_be_what_the_flag_says(flag, after, layers, said):
    if said is None:
        precision.check_made(flag, after, layers)
    else:
        with pytest.raises(ConfigError, match=said):
            precision.check_made(flag, after, layers)


def test_runs_of_before_keep_their_identity_and_a_policy_counts_as_its_flag():
    plain = batch_identity(TrainConfig(), 100)
    assert plain["--mixed-precision"] == "off"
    assert batch_identity(TrainConfig.of(mixed_precision="off"), 100) == plain
    by_flag = batch_identity(TrainConfig.of(mixed_precision="bfloat16"), 100)
    assert by_flag["--mixed-precision"] == "bfloat16"
    assert batch_identity(TrainConfig(), 100, BF16) == by_flag
    assert set(by_flag) == set(plain)
    assert batch_identity(TrainConfig(), 100, F64) == plain | {"dtype policy": "float64", "floatx": "float64"}


def test_a_loss_scale_is_refused_for_parameter_servers():
    precision.check_for_servers("mixed_bfloat16")
    with pytest.raises(ConfigError, match="mixed_float16 with --strategy parameter-server"):
        precision.check_for_servers("mixed_float16")


@pytest.mark.parametrize(
    "found", [None, [], "float16", {}, {"policy": 3, "floatx": "float32"}, {"policy": "x", "floatx": []}]
)
def test_what_a_folder_says_is_not_believed_blindly(found):
    assert precision.parse(found) == Precision()


def test_what_was_written_is_read_again():
    assert precision.parse(dataclasses.asdict(F64)) == F64
