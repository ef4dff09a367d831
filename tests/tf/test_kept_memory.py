"""The memory of tensors that a step frees stays with the process: the next one gets it without a page being cleared."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

#: Prints pages that the system handed out in each round, once what a round needs has been taken, and the weights' hash.
PROGRAM = """
import hashlib, resource, sys
from raytf.training.process import process
from raytf.training.process.process import ProcessSettings

process.load_tensorflow(ProcessSettings(1), [])
import tensorflow as tf

@tf.function
def one_round(values):
    return values * 1.5 + tf.cast(tf.cast(values * 3.0, tf.int32), tf.float32)

values = tf.Variable(tf.random.stateless_normal([5000, 5000], [1, 2]))  # 100 MB, more than the C library ever keeps
for number in range(6):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    values.assign(one_round(values))
    if number > 1:
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(hashlib.sha256(values.numpy().tobytes()).hexdigest())
"""


def pages(**environment: str) -> tuple[list[int], str]:
    """Pages that each round was handed out, and the hash of what it computed."""
    clean = {name: value for name, value in os.environ.items() if "BFC" not in name}
    # With oneDNN, which TensorFlow takes on processors with VNNI, it keeps memory by itself.
    fixed = {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3", "TF_ENABLE_ONEDNN_OPTS": "0"}
    env = clean | fixed | environment
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=root, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *rounds, digest = done.stdout.split()
    return [int(each) for each in rounds], digest


def test_a_round_reuses_the_memory_of_the_last_and_computes_the_same_bits():
    kept, digest = pages()
    assert max(kept) < 1000
    given_back, same = pages(TF_CPU_ALLOCATOR_USE_BFC="false")
    assert min(given_back) > 20_000, "who sets the variable has his way"
    assert digest == same
