"""Keras programs, each run by plain Keras and by `raytf run` with one worker and with two, on one Ray.

A program of `programs/` prints its results as `OUTCOME {...}`. With one logical shard they are Keras's; with several,
too, if the program says `# shards: any` (arrays are divided into ranges of records first, so that the batches of a
program whose batch is not the whole array are others); and one worker and two have the same, to the bit. A program
that says `# error: TEXT` fails with that text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.programs import Ended, Program, Programs, differences, without_weights

PROGRAMS = [Program.read(path) for path in sorted((Path(__file__).parent / "programs").glob("*.py"))]
#: Those that the gate runs.
SAMPLE = {"accumulating_step", "frozen_model", "sharpness_aware"}
#: Each takes some ten seconds where nothing else runs; an error some five.
PATIENCE = 240.0

#: run(program, name, *flags): the program, by `raytf run` with these flags.
Run = Callable[..., Ended]


@pytest.fixture
def run(tmp_path: Path, cluster: dict[str, str]) -> Run:
    """run(program, name, *flags): by `raytf run` with these flags; without flags by plain Keras."""
    programs = Programs()

    def begin(program: Program, name: str, *flags: object) -> Ended:
        common = ("--no-warm-workers", "--storage", tmp_path / "runs", "--run", name)
        words = [str(flag) for flag in (*common, *flags)] if flags else None
        env = {"RAY_ADDRESS": cluster["RAY_ADDRESS"], "KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}
        return programs.run(program.path, tmp_path / name, words, env, PATIENCE)

    return begin


def outcome(ended: Ended) -> dict:
    """The outcome of a program that ran to its end."""
    assert ended.code == 0, ended.output
    assert isinstance(ended.outcome, dict), f"no line OUTCOME in\n{ended.output}"
    return ended.outcome


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(each, id=each.path.stem, marks=() if each.path.stem in SAMPLE else pytest.mark.slow)
        for each in PROGRAMS
        if not each.error
    ],
)
def test_a_program_trains_as_plain_keras_with_any_number_of_workers(run: Run, program: Program):
    theirs = without_weights(outcome(run(program, "plain")))
    undivided = outcome(run(program, "undivided", "--workers", 1, "--logical-shards", 1))
    assert not differences(without_weights(undivided), theirs)
    alone = outcome(run(program, "alone", "--workers", 1))
    if program.any_shards:
        assert not differences(without_weights(alone), theirs)
    assert outcome(run(program, "both", "--workers", 2)) == alone


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(each, id=each.path.stem, marks=() if each.path.stem in SAMPLE else pytest.mark.slow)
        for each in PROGRAMS
        if each.error
    ],
)
def test_a_program_that_cannot_be_trained_says_so(run: Run, program: Program):
    for workers in (1, 2):
        ended = run(program, f"of-{workers}", "--workers", workers)
        assert ended.code not in (0, None), ended.output
        assert program.error in ended.output


def test_rows_of_the_guides_table_of_differences(run: Run):
    program = Program(Path(__file__).parent / "jobs" / "differences.py")
    plain, mine = run(program, "plain"), run(program, "alone", "--workers", 1)
    theirs, ours = outcome(plain), outcome(mine)
    for name in ("in the order of the arrays", "with BatchNorm"):
        assert differences(ours[name], theirs[name]), name
    undivided = outcome(run(program, "undivided", "--workers", 1, "--logical-shards", 1))
    assert not differences(undivided["in the order of the arrays"], theirs["in the order of the arrays"])
    assert (theirs["several numbers"], ours["several numbers"]) == (["ndarray"] * 2, ["list"] * 2)
    assert (theirs["as before the exception"], ours["as before the exception"]) == (False, True)
    assert (theirs["seed decides"], ours["seed decides"]) == (True, False)
    assert "Epoch 1/2" in plain.stdout
    assert "Epoch" not in mine.stdout
