"""Host memory of a worker whose state has to be copied from a device, tensor by tensor: two slots, one share, and two
tensors. There is no GPU: `tests.tf.state_copy` makes each tensor again when it is fetched, as fetching from one does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gate  # minutes, which .ci/run has

MIB = 2**20
#: Threads, the text of slots, and what the allocator keeps of what was freed: up to 32 MiB a thread.
SPARE = 64 * MIB


def run(folder: Path, megabytes: int, tensors: int, how: str) -> dict[str, int]:
    """Peaks of memory, bytes."""
    command = [sys.executable, "-m", "tests.tf.state_copy", str(folder), str(megabytes), str(tensors), how]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def bounds(megabytes: int, tensors: int) -> tuple[int, int]:
    """Of private memory, and of the slots: the share that is written and two tensors; two slots with their room."""
    state = megabytes * MIB
    return state + 2 * state // tensors + SPARE, 2 * (state + state // 8) + SPARE


def test_copying_and_saving_2_gb_takes_two_slots_one_share_and_two_tensors(tmp_path: Path):
    megabytes, tensors = 2000, 25
    peak = run(tmp_path, megabytes, tensors, "one-by-one")
    print(peak)
    private, shared = bounds(megabytes, tensors)
    assert peak["RssAnon"] <= private
    assert peak["RssShmem"] <= shared
    assert peak["VmHWM"] <= private + 2 * megabytes * MIB + SPARE  # the kernel's own peak: nothing between two looks
    assert peak["RssShmem"] >= 2 * megabytes * MIB, "both slots were filled"
    assert peak["RssAnon"] >= megabytes * MIB, "the share was there"


def test_taking_all_at_once_would_not_be_within_it(tmp_path: Path):
    """The way of before is kept in `state_copy.OnADevice`, so that the bound is known to tell the two apart."""
    megabytes, tensors = 400, 25
    assert run(tmp_path, megabytes, tensors, "all-at-once")["RssAnon"] > bounds(megabytes, tensors)[0]
