"""`raytf run`: whose flags are whose, and what is no program."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from raytf.commands import prove, replay, run, submit, tune
from raytf.config import flag_parsing
from raytf.testing import environment

RAYTF = [sys.executable, "-c", "from raytf.commands.main import main; main()", "run"]


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        (run, "raytf [flags] SCRIPT.py [its arguments]"),
        (submit, "raytf [ADDRESS...] [flags] -- COMMAND ..."),
        (tune, "raytf [JOB...] [flags] [-- FLAGS OF THE JOB]"),
        (replay, "raytf RUN [flags] -- COMMAND ..."),
        (prove, "raytf RUN [flags] -- COMMAND ..."),
    ],
)
def test_the_usage_says_where_the_program_is_typed(command, usage):
    assert flag_parsing.usage("raytf", flag_parsing.of_command(command.main)) == usage


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["train.py"], ["--program=train.py"]),
        (["--workers", "2", "train.py", "--workers", "9"], ["--workers", "2", "--program=train.py --workers 9"]),
        (["--exact", "--", "a b.py", "x y"], ["--exact", "--program='a b.py' 'x y'"]),
        (["train.py", "other.py"], ["--program=train.py other.py"]),
        (["--run=a.py"], ["--run=a.py"]),
        ([], []),
    ],
)
def test_what_begins_with_the_script_is_the_program_s(words, expected):
    assert run.arguments(words) == expected


@pytest.mark.parametrize(
    ("words", "said", "env"),
    [
        ([], "error: No script given. Expected: raytf run [flags] SCRIPT.py", {}),
        (["gone.py"], "error: gone.py: there is no such file. Expected: raytf run [flags] SCRIPT.py", {}),
        (["--workers", "x", "gone.py"], "error: --workers x", {}),
        (["{script}"], "error: KERAS_BACKEND=jax: raytf trains with tensorflow.", {"KERAS_BACKEND": "jax"}),
    ],
)
def test_what_is_no_program_is_one_line(tmp_path: Path, words, said, env):
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit(7)")
    command = [*RAYTF, *(word.format(script=script) for word in words)]
    done = subprocess.run(command, env=environment(**env), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


def test_a_script_has_its_own_arguments_and_exit_code(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text("import sys, beside; print(__name__, sys.argv, beside.HERE); raise SystemExit(7)")
    (tmp_path / "beside.py").write_text("HERE = 5")
    command = [*RAYTF, str(script), "--epochs", "3"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 7, done.stderr
    assert done.stdout.splitlines() == [f"__main__ {[str(script), '--epochs', '3']} 5"]
