"""A run on a node whose GPU is only said to be there; and one without GPUs, which never asks for any.

Ray is told of a GPU that does not exist, and the driver of CUDA is one that the test compiles, which finds none.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from raytf.config.command_line import EXIT_FAILED
from raytf.testing import ElasticCluster
from tests.ray.conftest import EVERYTHING, ROOT

STUB = ROOT / "tests" / "tf" / "stub_cuda.c"


@pytest.mark.slow
def test_a_missing_promised_gpu_ends_a_run_and_one_without_gpus_never_asks(start, tmp_path: Path):
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", STUB], check=True)
    log = tmp_path / "calls"
    under = (
        "env",
        f"LD_LIBRARY_PATH={tmp_path}",
        f"STUB_LOG={log}",
        f"RAY_OVERRIDE_RESOURCES={json.dumps({'GPU': 1})}",
    )
    with ElasticCluster() as cluster:
        cluster.add_node(cpus=4, under=under)
        servers = ("--strategy", "parameter-server", "--ps", 1, "--workers", 1)
        run = start(EVERYTHING, "--storage", tmp_path, "--steps", 4, "--no-use-gpu", *servers, **cluster.env)
        assert run.ended() == 0, run.output
        assert not log.exists(), log.read_text()

        run = start(EVERYTHING, "--storage", tmp_path / "b", "--use-gpu", "--workers", 1, **cluster.env)
        assert run.ended() == EXIT_FAILED, run.output
    (error,) = [line for line in run.output.splitlines() if line.startswith("error: ")]
    assert "Ray gave this worker GPU 0, and none can be used: cuInit: CUDA_ERROR_NO_DEVICE: no CUDA-capable" in error
    assert "Traceback" not in run.output
    again = [line for line in run.output.splitlines() if "starting again" in line]
    assert again
    assert all(error.removeprefix("error: ") in line for line in again)
