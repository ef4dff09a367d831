"""The table of trials: states, the best one's star, and lines for those who have no terminal."""

from __future__ import annotations

import io

from rich.console import Console

from raytf.config.objective import MetricObjective
from raytf.tune.search_record import TrialOutcome, TrialRecord
from raytf.tune.table import LiveTable, TrialRow, TrialTable, change_text

GOAL = MetricObjective.of("val_accuracy")


def board() -> TrialTable:
    made = TrialTable(["learning_rate"], GOAL, [TrialRow({"learning_rate": 10.0**-i}) for i in range(5)])
    made.settle(TrialRecord(0, {}, TrialOutcome.FINISHED, 0.91, 6))
    made.settle(TrialRecord(1, {}, TrialOutcome.STOPPED, 0.99, 2, "others were better"))
    made.settle(TrialRecord(2, {}, TrialOutcome.FINISHED, 0.97, 6))
    made.settle(TrialRecord(3, {}, TrialOutcome.FAILED, None, 0, "the loss became nan"))
    return made


def test_the_best_of_those_that_finished_has_the_star():
    assert board().columns() == ["", "trial", "state", "learning_rate", "epoch", "val_accuracy", "why"]
    assert board().cells() == [
        ["", "trial-000", "finished", "1", "6", "0.91", "-"],
        ["", "trial-001", "stopped", "0.1", "2", "0.99", "others were better"],
        ["*", "trial-002", "finished", "0.01", "6", "0.97", "-"],
        ["", "trial-003", "failed", "0.001", "-", "-", "the loss became nan"],
        ["", "trial-004", "waiting", "0.0001", "-", "-", "-"],
    ]


def test_small_values_are_the_best_of_a_loss():
    made = board()
    made.goal = MetricObjective.of("val_loss")
    assert [cells[0] for cells in made.cells()] == ["*", "", "", "", ""]


def test_a_terminal_gets_the_table_and_others_only_lines():
    for is_terminal in (True, False):
        out = io.StringIO()
        view = LiveTable(board(), Console(file=out, force_terminal=is_terminal, width=120, highlight=False))
        with view:
            view.say("trial-004 starts")
            view.show()
        assert "trial-004 starts" in out.getvalue()
        assert ("val_accuracy" in out.getvalue()) is is_terminal


def test_changes_as_lines():
    rows = board().rows
    rows[4].state = "running"
    assert change_text(4, rows[4], GOAL) == "trial-004 starts: learning_rate=0.0001"
    assert change_text(0, TrialRow({}, "running"), GOAL) == "trial-000 starts: the defaults"
    assert change_text(2, rows[2], GOAL) == "trial-002 finished: val_accuracy 0.97 after 6 epochs"
    assert change_text(1, rows[1], GOAL) == "trial-001 stopped: others were better"
    assert change_text(3, rows[3], GOAL) == "trial-003 failed: the loss became nan"
