"""Steps of a run are computed again: the same bits, whatever became of the run; and what there is to see of one."""

from __future__ import annotations

import csv
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import raytf
from raytf.runs import digest_log, run_log, start_command
from raytf.runs.start_command import StartCommand
from raytf.storage.storage import Storage
from raytf.testing import Job, environment
from tests.ray.conftest import PATIENCE, ROOT, result_of
from tests.ray.jobs import poisoned
from tests.stress.repair import workers_of

LAW = ROOT / "tests" / "stress" / "law" / "job.py"
POISONED = ROOT / "tests" / "ray" / "jobs" / "poisoned.py"


def replay(*flags: object, cwd: Path = ROOT, name: str = "replay") -> subprocess.CompletedProcess[str]:
    code = "import sys; from raytf.commands.main import main; main(sys.argv[1:])"
    command = [sys.executable, "-c", code, name, *map(str, flags)]
    return subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.slow
def test_a_step_of_a_run_that_was_killed_and_resized_is_computed_again(tmp_path: Path):
    status, slow = tmp_path / "status.json", tmp_path / "slow"
    slow.touch()
    command = [sys.executable, str(LAW), "--data", "digits", "--steps", "150", "--global-batch-size", "64"]
    command += ["--workers", "1:3", "--model", "batchnorm", "--pause", "0.4", "--pause-while", str(slow)]
    command += ["--checkpoint-every-steps", "40", "--keep", "9"]
    command += ["--storage", str(tmp_path), "--run", "a", "--status-file", str(status)]
    with Job(command, tmp_path / "log", environment(), status_file=status) as job:
        for number in range(3):
            at = job.step or 0
            job.until(lambda at=at: (job.step or 0) >= at + 15 and len(workers_of(job)) > 1, PATIENCE)
            workers_of(job)[number % 2].kill()
            job.until(lambda n=number: job.output.count("; the others continue") > n, PATIENCE)
        slow.unlink()
        job.wait(PATIENCE)
    noted = digest_log.read(Storage(str(tmp_path / "a")), run_log.STEPS)
    assert all(noted.of(step) is not None for step in range(1, 151))
    for workers in (1, 3):
        done = replay(tmp_path / "a", "--step", 70, "--workers", workers, "--", *command)
        assert done.returncode == 0, done.stdout + done.stderr
        assert re.search(r"\d+ steps, up to step 70, are the same, bit for bit", done.stdout), done.stdout
    # Nothing of the run has changed.
    assert result_of(tmp_path / "a")["steps"] == 150
    assert raytf.read_steps(str(tmp_path / "a"))["step"].tolist() == list(range(1, 151))


def test_what_there_is_to_see_of_a_step_names_the_poisoned_record(tmp_path: Path):
    flags = ["--workers", "1", "--steps", "30", "--global-batch-size", "32", "--no-warm-workers"]
    command = [sys.executable, str(POISONED), *flags, "--storage", str(tmp_path), "--run", "a"]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True, timeout=PATIENCE)
    losses = raytf.read_steps(str(tmp_path / "a"))["loss"]
    step = int(np.argmax(losses[:10])) + 1  # of the first epoch
    done = replay(tmp_path / "a", "--step", step, "--dump", tmp_path / "seen", "--notebook", "--", *command)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the program went on" not in done.stdout
    rows = list(csv.DictReader((tmp_path / "seen" / "records.csv").open()))
    assert (int(rows[0]["record"]), len(rows)) == (poisoned.RECORD, 32)
    assert float(rows[0]["loss"]) > 3 * float(rows[1]["loss"])
    with np.load(tmp_path / "seen" / "before.npz") as before, np.load(tmp_path / "seen" / "after.npz") as after:
        assert any((before[name] != after[name]).any() for name in before.files)
    # The last lines are a program that loads it.
    program = "\n".join(done.stdout.splitlines()[-3:])
    program += f"\nassert int(records[0]['record']) == {poisoned.RECORD} and len(batch['x']) == 32 and before.files"
    subprocess.run([sys.executable, "-c", program], check=True)
    again = replay(tmp_path / "a", "--step", step, "--dump", tmp_path / "seen", "--", *command)
    assert again.returncode == 2
    assert "is empty or does not exist" in again.stderr


@pytest.mark.slow  # tests/unit/audit/test_step_replay.py has what is compared
def test_losses_of_sums_of_floats_are_compared(tmp_path: Path):
    flags = ["--workers", "1", "--steps", "12", "--global-batch-size", "32", "--reduction", "float"]
    flags += ["--no-warm-workers", "--checkpoint-every-steps", "6", "--storage", str(tmp_path), "--run", "a"]
    command = [sys.executable, str(POISONED), *flags]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, capture_output=True, timeout=PATIENCE)
    done = replay(tmp_path / "a", "--step", 9, "--", *command)
    said = done.stdout
    assert "the run has no digest of step 9, so losses are compared" in said
    assert "3 steps cannot be compared bit by bit: step 7 has no digest\n  3 losses are the same" in said, said
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--step", 0), "--step 0: expected a number, 1 or more"),
        (("--step", 400), "has recorded 3 steps"),
    ],
)
def test_what_cannot_be_compared_is_said_before_anything_is_started(tmp_path: Path, flags, says: str):
    log = run_log.StepLog(Storage(str(tmp_path / "a")), run_log.new_attempt())
    log.add(1, 0, np.zeros(3), np.zeros(3))
    log.write(log.take())
    done = replay(tmp_path / "a", *flags)
    assert done.returncode == 2
    assert says in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("name", ["replay", "prove"])
@pytest.mark.parametrize("words", [["{evil}"], ["raytf", "run", "{evil}"], ["raytf/../evil.py"]])
def test_nothing_that_a_folder_records_is_run(tmp_path: Path, name: str, words: list[str]):
    evil, run = tmp_path / "evil.py", Storage(str(tmp_path / "a"))
    evil.write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()")
    log = run_log.StepLog(run, run_log.new_attempt())
    log.add(1, 0, np.zeros(3), np.zeros(3))
    log.write(log.take())
    start_command.write(run, StartCommand(tuple(word.format(evil=evil) for word in words), str(tmp_path)))
    done = replay(tmp_path / "a", *(["--step", 2] if name == "replay" else []), cwd=tmp_path, name=name)
    assert done.returncode == 2
    assert "never a command from the run's folder" in done.stderr
    assert not (tmp_path / "ran").exists()
