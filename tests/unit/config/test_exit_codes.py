"""How drivers end: one table in code, for people and for `raytf submit`."""

import re
import signal
from pathlib import Path

import pytest

from raytf import errors
from raytf.cluster.resubmission import JobSighting, NextMove, ResubmissionLimits, judge
from raytf.config import exit_codes
from raytf.config.exit_codes import ENDINGS, AfterEnding

DOCS = Path(__file__).parents[3] / "docs" / "guides" / "endings.md"
MOVES = {
    AfterEnding.FAILED: NextMove.FAILED,
    AfterEnding.REFUSED: NextMove.REFUSED,
    AfterEnding.STOPPED: NextMove.STOPPED,
    AfterEnding.AGAIN: NextMove.RESUBMIT,
}


def test_the_docs_have_the_table():
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", DOCS.read_text(), re.MULTILINE)
    assert [(int(code), what, then) for code, what, then in rows] == [(e.code, e.what, e.then.value) for e in ENDINGS]
    assert len({e.code for e in ENDINGS}) == len(ENDINGS)


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (errors.ConfigError("x"), exit_codes.REFUSED),
        (errors.RunMismatchError("x"), exit_codes.REFUSED),
        (errors.DataError("x"), exit_codes.REFUSED),
        (errors.ModelError("x"), exit_codes.REFUSED),
        (errors.ExactnessError("x"), exit_codes.REFUSED),
        (errors.CheckpointError("x"), exit_codes.REFUSED),
        (errors.ClusterError("x"), exit_codes.REFUSED),
        (errors.ClusterError("x", passes=True), exit_codes.AGAIN),
        (errors.RunInUseError("x"), exit_codes.AGAIN),
        *((errors.StorageError("x", kind), exit_codes.REFUSED) for kind in ("missing", "denied", "full", "other")),
        (errors.StorageError("x", "unreachable"), exit_codes.AGAIN),
        (errors.JobError("x"), exit_codes.FAILED),
        (errors.HangError("x"), exit_codes.FAILED),
        (errors.ReplicaError("x", []), exit_codes.FAILED),
        (errors.WorkerLostError("x"), exit_codes.FAILED),
        (errors.NonFiniteLossError("x", 3), exit_codes.FAILED),
    ],
)
def test_each_error_has_an_ending(error: errors.RaytfError, ending: exit_codes.Ending):
    assert exit_codes.of_error(error) == ending


@pytest.mark.parametrize("ending", ENDINGS[1:], ids=lambda e: str(e.code))
def test_what_is_submitted_again_is_decided_by_the_table(ending: exit_codes.Ending):
    codes = {ending.code} | ({128 - ending.code} if ending.code > 128 else set())  # as a shell and as Python gives it
    for code in codes:
        assert exit_codes.of_code(code) == ending
        assert judge(JobSighting("FAILED", code), 0.0, ResubmissionLimits()).move is MOVES[ending.then]


def test_codes_of_which_the_table_knows_nothing():
    assert exit_codes.of_code(-signal.SIGBUS) == exit_codes.of_code(128 + signal.SIGBUS) == exit_codes.CRASHED
    assert exit_codes.of_code(3) == exit_codes.of_code(255) == exit_codes.FAILED
