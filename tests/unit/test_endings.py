"""How drivers end: one table in code, for people and for `raytf submit`."""

import re
import signal
from pathlib import Path

import pytest

from raytf import endings, errors
from raytf.cluster.resubmit import Limits, Move, Sight, judge
from raytf.endings import ENDINGS, Then

DOCS = Path(__file__).parents[2] / "docs" / "endings.md"
MOVES = {
    Then.FAILED: Move.FAILED,
    Then.REFUSED: Move.REFUSED,
    Then.STOPPED: Move.STOPPED,
    Then.AGAIN: Move.RESUBMIT,
}


def test_the_docs_have_the_table():
    rows = re.findall(r"^\| (\d+) \| (.+) \| (.+) \|$", DOCS.read_text(), re.MULTILINE)
    assert [(int(code), what, then) for code, what, then in rows] == [(e.code, e.what, e.then.value) for e in ENDINGS]
    assert len({e.code for e in ENDINGS}) == len(ENDINGS)


@pytest.mark.parametrize(
    ("error", "ending"),
    [
        (errors.ConfigError("x"), endings.REFUSED),
        (errors.RunMismatchError("x"), endings.REFUSED),
        (errors.DataError("x"), endings.REFUSED),
        (errors.ModelError("x"), endings.REFUSED),
        (errors.ExactnessError("x"), endings.REFUSED),
        (errors.CheckpointError("x"), endings.REFUSED),
        (errors.ClusterError("x"), endings.REFUSED),
        (errors.ClusterError("x", passes=True), endings.AGAIN),
        (errors.RunInUseError("x"), endings.AGAIN),
        *((errors.StorageError("x", kind), endings.REFUSED) for kind in ("missing", "denied", "full", "other")),
        (errors.StorageError("x", "unreachable"), endings.AGAIN),
        (errors.JobError("x"), endings.FAILED),
        (errors.HangError("x"), endings.FAILED),
        (errors.ReplicaError("x", []), endings.FAILED),
        (errors.WorkerLostError("x"), endings.FAILED),
        (errors.NonFiniteLossError("x", 3), endings.FAILED),
    ],
)
def test_each_error_has_an_ending(error: errors.RaytfError, ending: endings.Ending):
    assert endings.of_error(error) == ending


@pytest.mark.parametrize("ending", ENDINGS[1:], ids=lambda e: str(e.code))
def test_what_is_submitted_again_is_decided_by_the_table(ending: endings.Ending):
    codes = {ending.code} | ({128 - ending.code} if ending.code > 128 else set())  # as a shell and as Python gives it
    for code in codes:
        assert endings.of_code(code) == ending
        assert judge(Sight("FAILED", code), 0.0, Limits()).move is MOVES[ending.then]


def test_codes_of_which_the_table_knows_nothing():
    assert endings.of_code(-signal.SIGBUS) == endings.of_code(128 + signal.SIGBUS) == endings.CRASHED
    assert endings.of_code(3) == endings.of_code(255) == endings.FAILED
