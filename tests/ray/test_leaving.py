"""Models with losses of their own, a policy of their own, or no way to export them: real runs of two workers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

JOB = Path(__file__).parent / "jobs" / "leaving.py"
FLAGS = ["--workers", "2", "--global-batch-size", "64", "--logical-shards", "4", "--steps", "3"]


def told(output: str) -> dict[str, dict]:
    lines = [json.loads(line.split(" ", 1)[1]) for line in output.splitlines() if line.startswith("TOLD ")]
    return {line["kind"]: line for line in lines}


#: Kind of model -> what of it can be used afterwards, and words of the warning about the rest.
LEFT = {
    "lambda": (["keras", "saved_model"], "is a Lambda, whose Python code"),
    "secretive": (["saved_model", "weights"], "In its classes, define get_config()"),
    "nested": (["keras"], "cannot be exported for serving"),
}


@pytest.mark.slow  # tests/tf/test_leaving.py has such models in one process
def test_a_model_that_cannot_be_exported_trains_and_its_weights_are_usable(start_there, tmp_path: Path):
    output = start_there(JOB, *FLAGS, "--kinds", ",".join(LEFT), "--storage", tmp_path / "runs").wait()
    runs = output.split("TOLD ")
    for (kind, (left, warning)), said in zip(LEFT.items(), runs[:-1], strict=True):
        one = told(output)[kind]
        assert len(set(one["sha256"])) == 1
        ours, theirs = one["first loss"]
        assert abs(ours - theirs) <= 1e-6 * abs(theirs)
        for mine, plain in zip(*one["weights"], strict=True):
            np.testing.assert_allclose(mine, plain, rtol=0, atol=1e-6 * np.abs(plain).max())
        assert one["export"] == left
        (line,) = (line for line in said.splitlines() if "WARNING" in line and warning in line)
        assert said.index(line) < said.index("epoch 1: ")


@pytest.mark.slow  # tests/tf/test_precision.py decides what holds, and test_step.py trains with it
def test_a_policy_that_the_job_has_set_holds_on_all_workers(start_there, tmp_path: Path):
    flags = [*FLAGS, "--kinds", "lambda", "--policy", "mixed_bfloat16", "--storage", tmp_path / "runs"]
    output = start_there(JOB, *flags).wait()
    assert "dtype policy, as the job has set it: mixed_bfloat16" in output
    one = told(output)["lambda"]
    assert (one["dtype"], one["policy"]) == ("bfloat16", "mixed_bfloat16")
    refused = start_there(JOB, *flags, "--mixed-precision", "off", "--run", "other")
    assert refused.ended() == 2
    assert "--mixed-precision off, but the job has set the dtype policy mixed_bfloat16" in refused.output
