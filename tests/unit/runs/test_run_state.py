"""Where a run stands: decided in one place, and told alike by all that tell of it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import socket

import pytest

from raytf.commands import report, runs, show
from raytf.runs import history, inventory, ledger, run_state
from raytf.runs.lease import Lease
from raytf.runs.run_state import RunState
from raytf.storage.storage import Storage
from tests.support.checkpoints import save

STARTED = {"time": 1.0, "kind": "driver", "state": "started", "pid": os.getpid(), "host": socket.gethostname()}
TRAINS = {"time": 5.0, "kind": "progress", "step": 120, "total": 300, "workers": 2, "phase": "training"}
WAITS = {"time": 6.0, "kind": "waiting", "possible": 1, "wanted": 2}
ENDED = {"time": 9.0, "kind": "driver", "state": "ended"}
FAILED = {**ENDED, "outcome": "failed", "text": "the loss of step 121 is NaN"}
TOLD = {**ENDED, "outcome": "stopped", "text": "told to stop (SIGTERM), saved step 120"}
CTRL_C = {**ENDED, "outcome": "failed", "text": "KeyboardInterrupt"}
FINISHED = {**ENDED, "outcome": "finished"}
GONE = "the driver disappeared without recording its end"
RESULT = {"steps": 300, "metrics": {"loss": 0.1, "test_accuracy": 0.98}, "history": [{"epoch": 0, "loss": 0.1}]}

#: Events; the result; whether the lease's owner lives; step of the newest checkpoint; what is told.
CASES = {
    "finished": ([STARTED, TRAINS, FINISHED], RESULT, None, 300, (RunState.FINISHED, "", 300)),
    "failed": ([STARTED, TRAINS, FAILED], None, None, 100, (RunState.FAILED, FAILED["text"], 120)),
    "killed": ([STARTED, TRAINS], None, False, 100, (RunState.KILLED, GONE, 120)),
    "interrupted": ([STARTED, TRAINS, CTRL_C], None, None, 120, (RunState.STOPPED, "interrupted", 120)),
    "told to stop": ([STARTED, TRAINS, TOLD], None, None, 120, (RunState.STOPPED, TOLD["text"], 120)),
    "running": ([STARTED, TRAINS], None, True, 100, (RunState.RUNNING, "", 120)),
    "waiting": ([STARTED, TRAINS, WAITS], None, True, 100, (RunState.WAITING, "", 120)),
    "waited": ([STARTED, WAITS, TRAINS], None, True, None, (RunState.RUNNING, "", 120)),
    "going on": ([STARTED, TRAINS, FINISHED, STARTED], RESULT, True, 300, (RunState.RUNNING, "", 300)),
    "of an old version, finished": ([], RESULT, None, 300, (RunState.FINISHED, "", 300)),
    "of an old version, went on": ([], RESULT, None, 310, (RunState.STOPPED, "", 310)),
    "of an old version, killed": ([], None, False, 5, (RunState.KILLED, GONE, 5)),
    "of an old version, stopped": ([], None, None, 5, (RunState.STOPPED, "", 5)),
    "nothing yet": ([], None, None, None, (RunState.STOPPED, "", None)),
    "killed before its result": ([STARTED, TRAINS, FINISHED], None, False, 300, (RunState.KILLED, GONE, 300)),
    "killed after its result": ([STARTED, {**TRAINS, "step": 300}], RESULT, False, 300, (RunState.FINISHED, "", 300)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_table(name):
    events, result, lives, newest, told = CASES[name]
    found = run_state.of(events, result, lives, newest)
    assert (found.state, found.why, found.step) == told
    assert found.metrics == (RESULT["metrics"] if result is not None else {})


def test_epochs_are_judged_by_their_best_value():
    epochs = [{"epoch": e, "val_accuracy": v} for e, v in enumerate([0.5, 0.9, 0.7])]
    run = run_state.of([STARTED, TRAINS], None, True, 5, epochs)
    assert (run.metric, run.best, run.epoch, run.last) == ("val_accuracy", 0.9, 1, 0.7)
    assert run.metrics == {"val_accuracy": 0.7}
    bare = run_state.of([STARTED, TRAINS], None, True, 5)
    assert (bare.metric, bare.best, bare.epoch, bare.last, bare.metrics) == (None, None, None, None, {})


def test_damage_counts_where_nobody_trains():
    assert run_state.of([STARTED, TRAINS], None, True, 5, is_damaged=True).state is RunState.RUNNING
    assert run_state.of([STARTED, TRAINS, FAILED], None, None, 5, is_damaged=True).state is RunState.DAMAGED


def make(run: Storage, events: list[dict], result: dict | None, newest: int | None) -> None:
    book = ledger.Ledger(run, "000000-a")
    book.add(events)
    book.flush()
    if result is not None:
        run.put("result.json", json.dumps(result).encode())
    if newest is not None:
        save(run, newest, history=[{"epoch": 0, "step": newest, "loss": 0.5, "val_accuracy": 0.7}])


@pytest.mark.parametrize("name", CASES)
def test_runs_show_report_and_result_agree(name, tmp_path):
    """Of the same files; who owns a run is a real lease, held by this process, left by a dead one, or none."""
    events, result, lives, newest, (state, why, step) = CASES[name]
    storage = Storage(str(tmp_path / "runs"))
    run = storage.child("a")
    make(run, events, result, newest)
    with contextlib.ExitStack() as stack:
        if lives:
            stack.enter_context(Lease(run))
        elif lives is False:
            owner = {**Lease(run).owner, "pid": 2**22 + 1, "started": "1"}
            run.put("lease.json", json.dumps(owner).encode())
        if not (events or result or newest or lives is not None):
            return
        (listed,) = inventory.survey(storage)
        shown = history.load(run.uri)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            report.main(report.Report(run.uri, html=str(tmp_path / "page.html")))
        page = (tmp_path / "page.html").read_text()
        documents = json.loads(runs.document([listed]))[0], show.document(shown)
    for document in documents:
        assert (document["state"], document["why"], document["step"] or 0) == (state.value, why, step or 0)
    assert documents[0]["metrics"] == documents[1]["metrics"] == listed.metrics
    if state is RunState.FINISHED:
        assert documents[0]["metrics"] == RESULT["metrics"]
        assert documents[0]["step"] == RESULT["steps"]
    elif newest is not None and not result:
        assert documents[0]["metrics"] == {"loss": 0.5, "val_accuracy": 0.7}
    assert state.value in page
    assert shown.state in show.headline(shown)[0]


def test_the_end_of_a_ledger_says_what_the_whole_of_it_says(tmp_path):
    run = Storage(str(tmp_path))
    for number in range(4):
        book = ledger.Ledger(run, f"{number:06d}-a")
        book.add([STARTED, {**TRAINS, "step": 10 * number}, *([] if number == 3 else [TOLD])])
        book.flush()
    last = ledger.Ledger(run, "000004-a")
    last.add([STARTED])
    last.flush()
    end = ledger.newest(run, run.list(ledger.FOLDER), run_state.has_enough)
    assert len(end) == 3
    assert run_state.of(end, None, False) == run_state.of(ledger.read(run), None, False)
    assert run_state.of(end, None, False).step == 30
