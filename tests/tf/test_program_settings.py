"""What a program sets for its process is set in the processes that train its model, or refused."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

import pytest

from raytf.training.user.program_settings import ProgramSettings

pytestmark = pytest.mark.gate

#: Runs code, and prints what it leaves as a worker would print it that was sent it.
PROGRAM = """
import dataclasses, json, os, sys
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, tensorflow as tf
from raytf.errors import ConfigError
from raytf.training.user import program_settings
exec(sys.argv[1])
try:
    lines = program_settings.check()
except ConfigError as error:
    print(json.dumps(["refused", str(error)]))
else:
    print(json.dumps([lines, dataclasses.asdict(program_settings.of_process())]))
"""


def after(code: str) -> list:
    done = subprocess.run([sys.executable, "-c", PROGRAM, code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def plain(settings: ProgramSettings) -> dict:
    return json.loads(json.dumps(dataclasses.asdict(settings)))


def test_the_defaults_are_those_of_keras_and_tensorflow():
    assert after("pass") == [[], plain(ProgramSettings())]
    assert ProgramSettings().identity() == {}


def test_all_of_them_arrive():
    sent = ProgramSettings(
        0.25,
        "channels_first",
        numpy_behavior=True,
        prefers_float32=True,
        filters_tracebacks=(False, False),
        is_interactive=False,
        jit=True,
        optimizer_options={"disable_model_pruning": False, "disable_meta_optimizer": False, "constant_folding": False},
        soft_placement=False,
        tf32=False,
    )
    lines, arrived = after(f"program_settings.{sent!r}.apply()")
    assert lines == []
    assert arrived == plain(sent)
    assert set(sent.identity()) == {"keras.config.epsilon()", "keras.config.image_data_format()", "NumPy behavior"}


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("os.environ['KERAS_BACKEND'] = 'jax'", "backend 'jax'"),
        ("tf.experimental.numpy.experimental_enable_numpy_behavior(dtype_conversion_mode='all')", "'all'"),
    ],
)
def test_what_workers_cannot_have_is_refused(code: str, text: str):
    kind, message = after(code)
    assert kind == "refused"
    assert text in message


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("tf.config.run_functions_eagerly(True)", "trace the step anyway"),
        ("tf.config.threading.set_intra_op_parallelism_threads(3)", "--cpus-per-worker"),
    ],
)
def test_what_changes_nothing_of_the_result_is_left_out_and_named(code: str, text: str):
    (line,), _ = after(code)
    assert text in line
