"""Pairs of runs that differ in one thing: where they part, and why."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from raytf.testing import Job, environment
from tests.ray.conftest import ROOT

VARIANTS = ROOT / "tests" / "ray" / "jobs" / "variants.py"
#: Whose label `train` changes.
RECORD = 33
SAME = "the weights before the step are the same"
#: What is otherwise, the step, and what has to be said of it.
PAIRS = [
    ("rate", 2, "learning_rate"),
    ("schedule", 3, "learning_rate.config.decay_rate: 0.9 and 0.5"),
    ("optimizer", 2, "model optimizer: "),
    ("loss", 1, "model loss: "),
    ("activation", 1, "activation: relu and tanh"),
    ("units", 1, "units: 4 and 5"),
    ("code", 1, "code of the model: "),
    ("lambda", 1, "code of the model: "),
    ("train", None, "contents of the training data: "),
    ("seed", 1, "--seed: 0 and 1"),
    ("gradient", 70, SAME),
    ("weight", 71, "all shards differ, so the weights after step 70 do"),
]


def bisect(one: Path, other: Path) -> dict:
    code = "import sys; from raytf.commands.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, "bisect", str(one), str(other), "--json"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout) | {"parts": done.returncode == 1}


def run(start: Callable[..., Job], folder: Path, name: str, *flags: object) -> Path:
    wanted = ("--steps", 80, "--global-batch-size", 32, "--workers", 1, "--learning-rate", 0.02)
    wanted += ("--storage", folder, "--run", name)
    start(VARIANTS, *wanted, *flags).wait()
    return folder / name


@pytest.mark.slow
def test_each_of_twelve_pairs_parts_at_its_step_for_its_reason(start_there: Callable[..., Job], tmp_path: Path):
    usual = run(start_there, tmp_path, "usual")
    again = bisect(usual, run(start_there, tmp_path, "again"))
    assert (again["parts"], again["same_steps"], again["why"]) == (False, 80, [])
    wrong = []
    for other, step, reason in PAIRS:
        flags = ("--seed", 1) if other == "seed" else ("--other", other)
        found = bisect(usual, run(start_there, tmp_path, other, *flags))
        print(other, found["step"], found["why"])
        is_right = found["parts"] and any(reason in line for line in found["why"])
        if other == "train":  # the step of the first epoch in which the record is
            is_right = is_right and len(found["differs"]["shards"]) == 1 and 1 <= found["step"] <= 10
            is_right = is_right and any(SAME in line for line in found["why"])
            is_right = is_right and found["records"][0] == found["records"][1] and RECORD in found["records"][0]
        elif found["step"] != step:
            is_right = False
        if not is_right:
            wrong.append((other, found))
    assert not wrong
