"""Keras programs, each killed twice, on one worker, then three, then two: they end as undisturbed.

tests/ray/test_keras_programs.py has the parts of these in one program, and is what the gate runs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raytf.testing import Job, environment
from tests.ray.conftest import manifests
from tests.ray.test_resume import attempts
from tests.stress.keras_examples.__main__ import PROGRAMS, RAYTF

#: What each stands for -> the program.
KINDS = {
    "a VAE": "vae",
    "a GAN with two optimizers": "dcgan_overriding",
    "diffusion with an average of the weights": "ddim",
    "SimCLR": "simclr",
    "knowledge distillation": "knowledge_distillation",
    "CTC by add_loss": "ctc_ocr",
    "a frozen base": "transfer_learning",
    "a table of 10^7 rows": "large_embedding",
    "a stateful augmentation": "stateful_augmentation",
    "a generator without end": "endless_generator",
}
#: Long enough for a kill in the middle of the last `fit`.
EPOCHS, EVERY = 25, 40

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path: Path, cluster: dict[str, str]) -> Iterator[Callable[..., Job]]:
    """run(program, name, workers): `raytf run` of a program on the running Ray."""
    jobs: list[Job] = []

    def begin(program: str, name: str, workers: int) -> Job:
        flags = ["--storage", tmp_path, "--run", name, "--workers", workers, "--epochs", EPOCHS, "--no-warm-workers"]
        command = [*RAYTF, *flags, "--checkpoint-every-steps", EVERY, PROGRAMS / f"{program}.py"]
        env = environment(RAY_ADDRESS=cluster["RAY_ADDRESS"])
        jobs.append(Job([*map(str, command)], tmp_path / f"log-{len(jobs)}", env))
        return jobs[-1]

    yield begin
    for job in jobs:
        job.close()


def ends(folder: Path) -> list[tuple[int, str]]:
    """(steps, hash of the weights) of each `fit`."""
    results = sorted(folder.glob("*/result.json"), key=lambda path: int(path.parent.name))
    documents = [json.loads(path.read_text()) for path in results]
    return [(document["steps"], document["weights_sha256"]) for document in documents]


@pytest.mark.parametrize("kind", KINDS)
def test_a_program_that_is_killed_twice_ends_as_undisturbed(run: Callable[..., Job], tmp_path: Path, kind: str):
    run(KINDS[kind], "undisturbed", 1).wait()
    expected = ends(tmp_path / "undisturbed")
    last = tmp_path / "killed" / str(len(expected))
    for count, workers in enumerate((1, 3), 1):

        def has_saved(count: int = count) -> bool:
            begun = attempts(last)
            return len(begun) == count and manifests(last)[-1:] > [begun[-1]["from_step"]]

        killed = run(KINDS[kind], "killed", workers)
        killed.until(has_saved, 300)
        killed.kill()
    assert manifests(last)[-1] < expected[-1][0], "it was killed after its end"
    run(KINDS[kind], "killed", 2).wait()
    assert ends(tmp_path / "killed") == expected
    assert [attempt["from_step"] > 0 for attempt in attempts(last)] == [False, True, True]
