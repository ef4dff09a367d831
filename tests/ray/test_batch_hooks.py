"""Batch hooks that change what is learned, on workers that die inside of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from raytf.testing import Job, environment
from tests.ray.conftest import PATIENCE
from tests.ray.test_keras_programs import RAYTF, told

PROGRAM = Path(__file__).parent / "jobs" / "dying_hooks.py"
STEPS = 24


@pytest.fixture
def trained(tmp_path: Path, cluster: dict[str, str]) -> Callable[..., dict]:
    """trained(name, workers, *deaths): what the program prints, whose process dies at these hooks."""

    def run(name: str, workers: int, *deaths: str) -> dict:
        folder = tmp_path / f"{name}-deaths"
        folder.mkdir()
        for death in deaths:
            (folder / death).touch()
        flags = ["--storage", tmp_path, "--run", name, "--workers", workers, "--no-warm-workers", "--max-failures", 9]
        command = [*RAYTF, *map(str, flags), str(PROGRAM), str(folder), *deaths]
        with Job(command, tmp_path / f"{name}.log", environment(RAY_ADDRESS=cluster["RAY_ADDRESS"])) as job:
            output = job.wait(PATIENCE * 2)
        assert not list(folder.iterdir()), "a process did not die where it should have"
        return told(output)

    return run


def test_no_hook_is_left_out_or_run_twice_where_rank_0_dies_inside_of_it(trained: Callable[..., dict]):
    undisturbed = trained("undisturbed", 1)
    assert undisturbed["begun"] == [*range(STEPS // 2)] * 2
    assert (len(undisturbed["ended"]), undisturbed["penalty"]) == (STEPS, 0.24)
    assert trained("disturbed", 2, "end:5", "begin:15") == undisturbed
