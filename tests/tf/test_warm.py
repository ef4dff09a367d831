"""What a warm process imports leaves every setting to the worker that takes it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from raytf.testing.processes import environment

ROOT = Path(__file__).parents[2]
CODE = """
import os, sys, threading, types
before, threads = dict(os.environ), threading.active_count()
from raytf.training.process import warm_pool
warm_pool.import_beside(10)
def slow():
    "Names of this process's threads that have a lower priority than others."
    found = {}
    for thread in os.listdir("/proc/self/task"):
        name, numbers = open(f"/proc/self/task/{thread}/stat").read().split("(", 1)[1].rsplit(")", 1)
        found[name] = int(numbers.split()[16]) - os.getpriority(os.PRIO_PROCESS, 0)
    return {name for name, nice in found.items() if nice > 0}
assert {"tensorflow", "raytf.training.step.step", "raytf.training.worker"} <= set(sys.modules)
changed = {k for k in before.keys() | os.environ.keys() if before.get(k) != os.environ.get(k)}
ours = ("TF_CONFIG", "TF_CPP", "TF_DETERMINISTIC", "KERAS_BACKEND", "OMP_", "CUDA_")
assert not [name for name in changed if name.startswith(ours)], changed
assert threading.active_count() == threads, threading.enumerate()
import tensorflow as tf
from tensorflow.python.eager import context
assert not context.context()._initialized, "an operation ran"
import keras
assert keras.config.backend() == "tensorflow"
# What `worker.set_up` and the step count on, all of it refused once an operation has run.
tf.config.experimental.enable_op_determinism()
tf.config.threading.set_intra_op_parallelism_threads(3)
tf.config.threading.set_inter_op_parallelism_threads(5)
tf.constant(1) + 1
assert tf.config.threading.get_intra_op_parallelism_threads() == 3
assert tf.config.threading.get_inter_op_parallelism_threads() == 5
assert slow() <= {"jemalloc_bg_thd"}, slow()  # it gives pyarrow's memory back
print("as if it were cold")
"""


def test_imports_fix_no_setting(tmp_path: Path):
    env = environment(TF_CPP_MIN_LOG_LEVEL="3", KERAS_BACKEND="tensorflow")
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        env=env,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    assert "as if it were cold" in done.stdout
