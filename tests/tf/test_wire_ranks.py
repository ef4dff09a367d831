"""The words of GPUs between real workers, on CPUs: the weights of the ordinary path, also from a state of before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from raytf.checkpoint import durable, manifest, variables
from raytf.checkpoint.variables import weights_sha256
from raytf.data.plan import StepPlan
from raytf.data.sources import ArraySource
from raytf.distributed.encoding.wire import DEVICE, HOST
from raytf.storage.storage import Storage
from tests.tf import before_wire
from tests.tf.ranks import Rank, World

pytestmark = pytest.mark.gate  # minutes, which .ci/run has

#: How workers communicate, the host of each, the form of whole numbers, and bytes in a bucket.
ORDINARY = ("auto", ["a"], "host", None)
GROUPS = [
    ("auto", ["a", "b", "a"], "device", None),  # through the memory of a host, and over the network
    ("ring", ["a", "b"], "host", 100),  # over the network alone; in buckets, beside the backward pass
]
#: More of them, which take minutes.
MORE = [
    ("auto", ["a", "a"], "device", None),
    ("ring", ["a", "b", "c", "d"], "device", None),
    ("auto", ["a", "a"], "host", 100),
    ("auto", ["a", "b", "a"], "device", 100),
    ("ring", ["a", "b", "c"], "device", 100),
]


@pytest.mark.parametrize("groups", [GROUPS, pytest.param(MORE, marks=pytest.mark.slow)], ids=["some", "more"])
def test_workers_that_encode_as_gpus_do_end_with_the_ordinary_weights(groups: list):
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-m", "tests.tf.wire_ranks", json.dumps([ORDINARY, *groups])]
    root = Path(__file__).parents[2]
    ended = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=400)
    assert ended.returncode == 0, ended.stderr
    found = {(number, rank): told for number, rank, told in json.loads(ended.stdout)}
    assert sorted(found) == [
        (n, rank) for n, (_, hosts, *_) in enumerate([ORDINARY, *groups]) for rank in range(len(hosts))
    ]
    whole, compressed = ordinary = found[0, 0]
    assert whole != compressed
    assert found == dict.fromkeys(found, ordinary)


@pytest.mark.parametrize("words", [HOST, DEVICE], ids=["host", "device"])
@pytest.mark.parametrize("name", before_wire.ENDS)
def test_a_checkpoint_of_before_goes_on_to_the_weights_of_before(name, words):
    x, y = before_wire.arrays()
    plan = StepPlan(len(x), before_wire.BATCH, before_wire.SHARDS)
    storage = Storage(str(before_wire.FOLDER / name))
    (saved,) = manifest.list_complete(storage)
    found = durable.load(storage, saved)
    assert found.step == before_wire.SAVED
    all_reduce = World(1).all_reduce(0)
    made = Rank(
        before_wire.build,
        ArraySource(x, y),
        plan,
        range(plan.shards),
        all_reduce,
        compress=name != "whole",
        words=words,
    )
    named = variables.variables(made.model) | made.step.reduction_state()
    variables.restore(named, found.tensors)
    made.train(found.step, before_wire.STEPS)
    assert weights_sha256(made.model) == before_wire.ENDS[name]
    # What the reduction would save now has the name, type and shape that it had.
    (exponents,) = made.step.reduction_state().values()
    before = found.tensors["reduction/00000/exponents"]
    assert (exponents.numpy().dtype, exponents.numpy().shape) == (before.dtype, before.shape)
