"""Processes that were given no GPU never start its driver, and one that was promised and is missing is a fault at once.

There is no GPU here: the driver is a library that is compiled for these tests, and writes down each call. The processes
and the code that sets them up are those of a run, without Ray: what it gave is told to `set_up`.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from raytf.distributed.gpu.visibility import HIDDEN
from raytf.testing.processes import environment

pytestmark = pytest.mark.gate  # minutes, which .ci/run has

ROOT = Path(__file__).parents[2]
#: The calls that TensorFlow may make when it looks for GPUs.
COMPUTE = """
import tensorflow as tf
assert tf.config.list_physical_devices() == tf.config.list_physical_devices("CPU")
@tf.function(jit_compile=True)
def square(x):
    return x @ x
assert float(square(tf.ones((4, 4)))[0, 0]) == 4
assert not tf.config.list_logical_devices("GPU")
print("computed")
"""
SET_UP = """
from raytf.training import worker
from raytf.distributed.membership.rendezvous import Meeting
from raytf.training.process.process import ProcessSettings
worker.set_up(Meeting(0, ("127.0.0.1:0",), bytes(32)), ProcessSettings(1, one_worker=True), {gpus})
"""
#: A warm process leaves the driver alone until a worker takes it, also where it hides nothing: it may be given a GPU.
WARM = """
import os
from raytf.training.process import warm_pool
warm_pool.import_all()
assert not os.path.exists(os.environ["STUB_LOG"]), "the driver was called"
"""
#: A worker whose GPU is missing. Its time begins where it is given its rank: by then, Ray is imported.
PROMISED = """
import time
from raytf.training import worker
from raytf.distributed.membership.rendezvous import Meeting
from raytf.training.process.process import ProcessSettings
from raytf.errors import GpuError
began = time.monotonic()
try:
    worker.set_up(Meeting(0, ("127.0.0.1:0",), bytes(32)), ProcessSettings(1, one_worker=True), ["0"])
except GpuError as error:
    assert error.retryable
    print(f"{time.monotonic() - began:.1f} {error}")
"""


@dataclass
class Driver:
    """Where the stub is, and what it writes down."""

    folder: Path
    log: Path

    def run(self, code: str, **more: str) -> tuple[str, list[str]]:
        """What a process prints, and the calls that it made."""
        self.log.unlink(missing_ok=True)
        env = environment(TF_CPP_MIN_LOG_LEVEL="3", KERAS_BACKEND="tensorflow", LD_LIBRARY_PATH=str(self.folder))
        env.pop("CUDA_VISIBLE_DEVICES", None)
        env |= {"STUB_LOG": str(self.log), **more}
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, timeout=180
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, self.log.read_text().split() if self.log.exists() else []


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Driver:
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).with_name("stub_cuda.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", folder / "libcuda.so.1", source], check=True)
    return Driver(folder, folder / "calls")


def test_a_process_that_hides_nothing_starts_the_driver(driver):
    """What the other tests look for can be seen."""
    printed, calls = driver.run(f"{SET_UP.format(gpus=None)}\n{COMPUTE}")
    assert "computed" in printed
    assert "cuInit" in calls


@pytest.mark.parametrize(
    ("before", "env"),
    [("", {}), (WARM, HIDDEN)],
    ids=["that starts cold", "that was warm"],
)
def test_a_worker_without_a_gpu_leaves_the_driver_alone(driver, before, env):
    printed, calls = driver.run(f"{before}{SET_UP.format(gpus=[])}\n{COMPUTE}", **env)
    assert "computed" in printed
    assert calls == []


@pytest.mark.parametrize(
    ("before", "env", "words"),
    [
        ("", {}, "cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable device is detected"),
        (WARM, {"STUB_CUINIT": "999"}, "cuInit: CUDA_ERROR_UNKNOWN: unknown error"),
        ("", {"STUB_CUINIT": "0", "STUB_COUNT": "0"}, "the driver finds no GPU"),
        ("", {"STUB_HANGS": "1"}, "the driver has not answered for 5 s"),
    ],
    ids=["no device", "warm", "none", "hangs"],
)
def test_a_promised_gpu_that_is_missing_is_said_within_10_s_in_one_line(driver, before, env, words):
    printed, calls = driver.run(before + PROMISED, **env)
    assert calls[0] == "cuInit"
    (line,) = printed.splitlines()
    seconds, _, text = line.partition(" ")
    assert float(seconds) < 10
    assert text.startswith("node here: Ray gave this worker GPU 0, and none can be used: ")
    assert words in text


def test_a_gpu_that_tensorflow_alone_does_not_find_names_the_libraries(driver):
    """The driver has a GPU; the libraries of CUDA are not installed here."""
    printed, _ = driver.run(PROMISED, STUB_CUINIT="0", STUB_COUNT="1")
    assert "TensorFlow cannot load libcudart.so.12" in printed
    assert "pip install 'raytf-train[gpu]'" in printed
