"""A run that has finished answers for the same command alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ray.conftest import manifests, result_of

VARIANTS = Path(__file__).parent / "jobs" / "variants.py"
#: What is otherwise -> words of the one line that says so.
OTHER = {
    "rate": ("optimizer", "0.1"),
}
MORE = {
    "activation": ("layers", "tanh"),
    "test": ("test data",),
    "loss": ("model loss", "mae"),
    "code": ("code of the model",),
    "layers": ("model",),
    "units": ("weights", "(4, 5)"),
    "schedule": ("optimizer",),
    "optimizer": ("Adam",),
    "body": ("code of the model",),
    "weights": ("loss weights",),
    "metrics": ("metrics",),
    "lambda": ("model structure",),
    "train": ("contents of the training data",),
    "validation": ("validation data",),
    "augment": ("augmentation",),
}


def flags(folder):
    run = ("--storage", folder, "--run", "a", "--epochs", 1)
    return (*run, "--workers", 1, "--global-batch-size", 64)


def ended(job, code):
    assert job.ended() == code, job.output
    return job.output


def refused(start_there, folder, other, words):
    said = ended(start_there(VARIANTS, *flags(folder), "--other", other), 2)
    (line,) = [text for text in said.splitlines() if text.startswith("error: ")]
    assert "has finished with other settings" in line
    assert "pass --new, or another --run name" in line
    assert all(word in line for word in words), line
    assert "sha:" not in said
    assert "Traceback" not in said


@pytest.fixture
def finished(start_there, tmp_path):
    said = start_there(VARIANTS, *flags(tmp_path)).wait()
    assert "sha:" in said
    return tmp_path


def test_another_rate_is_refused(start_there, finished):
    again = start_there(VARIANTS, *flags(finished)).wait()
    assert "nothing to do" in again
    assert "compared" not in again
    assert f"sha: {result_of(finished / 'a')['weights_sha256']}" in again
    for other, words in OTHER.items():
        refused(start_there, finished, other, words)
    beside = start_there(VARIANTS, *flags(finished), "--other", "rate", "--new").wait()
    assert "--new starts run a-2; to continue it later, replace --run a and --new with --run a-2" in beside
    assert f"sha: {result_of(finished / 'a-2')['weights_sha256']}" in beside
    assert f"sha: {result_of(finished / 'a')['weights_sha256']}" not in beside
    # A run of an older raytf, which stored less of itself: what there is counts.
    for file in (finished / "a" / "result.json", *(finished / "a").glob("**/manifest*.json")):
        document = json.loads(file.read_text())
        kept = document.get("identity") or {}
        for key in [k for k in kept if k.startswith(("model structure", "model loss weights", "contents", "code"))]:
            del kept[key]
        kept.pop("validation data", None)
        kept.pop("test data", None)
        if file.name == "result.json":
            file.write_text(json.dumps(document))
    older = start_there(VARIANTS, *flags(finished)).wait()
    assert "nothing to do" in older
    assert "older raytf" in older


@pytest.mark.slow
def test_whatever_else_is_another_is_refused(start_there, finished):
    assert "nothing to do" in start_there(VARIANTS, *flags(finished), "--other", "named").wait()
    for other, words in MORE.items():
        refused(start_there, finished, other, words)
    raised = ended(start_there(VARIANTS, *flags(finished), "--other", "raises"), 1)
    assert "there is no such model" in raised
    assert "nothing to do" not in raised


@pytest.mark.slow
def test_another_model_is_refused_for_a_run_that_has_not_finished(start_there, tmp_path):
    unfinished = [*flags(tmp_path), "--checkpoint-every-steps", 2]
    unfinished[unfinished.index("--epochs") + 1] = 10_000
    job = start_there(VARIANTS, *unfinished)
    job.until(lambda: manifests(tmp_path / "a"))
    job.kill()
    command = (tmp_path / "a" / "command.json").read_text()
    for _ in range(2):  # the second one is typed like the first, which was refused
        said = ended(start_there(VARIANTS, *unfinished, "--other", "activation"), 2)
        (line,) = [text for text in said.splitlines() if text.startswith("error: ")]
        assert "in storage was made with" in line  # another model, or on a busy machine other settings, by the workers
        assert "model" in line
        assert "pass --new, or another --run name" in line
        assert (tmp_path / "a" / "command.json").read_text() == command


@pytest.mark.slow
def test_data_that_are_others_each_time_are_no_difference(start_there, tmp_path):
    start_there(VARIANTS, *flags(tmp_path), "--other", "random").wait()
    assert "nothing to do" in start_there(VARIANTS, *flags(tmp_path), "--other", "random").wait()
