"""Models with losses of their own, a policy of their own, or no way to export them: real runs of two workers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

JOB = Path(__file__).parent / "jobs" / "leaving.py"
FLAGS = ["--workers", "2", "--global-batch-size", "64", "--logical-shards", "4", "--steps", "3"]


def told(output: str) -> dict[str, dict]:
    lines = [json.loads(line.split(" ", 1)[1]) for line in output.splitlines() if line.startswith("TOLD ")]
    return {line["kind"]: line for line in lines}


def test_models_that_cannot_be_exported_train_as_with_keras_and_their_weights_are_of_use(start_there, tmp_path: Path):
    job = start_there(JOB, *FLAGS, "--kinds", "lambda,secretive,nested", "--storage", tmp_path / "runs")
    output = job.wait()
    found = told(output)
    assert list(found) == ["lambda", "secretive", "nested"]
    for kind, one in found.items():
        assert len(set(one["sha256"])) == 1, kind
        ours, theirs = one["first loss"]
        assert abs(ours - theirs) <= 1e-6 * abs(theirs), kind
        for mine, plain in zip(*one["weights"], strict=True):
            np.testing.assert_allclose(mine, plain, rtol=0, atol=1e-6 * np.abs(plain).max(), err_msg=kind)
    assert [one["export"] for one in found.values()] == [
        ["keras", "saved_model"], ["saved_model", "weights"], ["weights"],
    ]  # fmt: skip
    for said in ("is a Lambda, whose Python code", "Give its classes a get_config()", "cannot be exported for serving"):
        (line,) = {line for line in output.splitlines() if said in line and "WARNING" in line}
        assert output.index(line) < output.index("epoch 1: ", output.index(line))


def test_a_policy_that_the_job_has_set_holds_on_all_workers(start_there, tmp_path: Path):
    flags = [*FLAGS, "--kinds", "lambda", "--policy", "mixed_bfloat16", "--storage", tmp_path / "runs"]
    output = start_there(JOB, *flags).wait()
    assert "dtype policy, as the job has set it: mixed_bfloat16" in output
    one = told(output)["lambda"]
    assert (one["dtype"], one["policy"]) == ("bfloat16", "mixed_bfloat16")
    refused = start_there(JOB, *flags, "--mixed-precision", "off", "--run", "other")
    assert refused.ended() == 2
    assert "--mixed-precision off, but the job has set the dtype policy mixed_bfloat16" in refused.output
