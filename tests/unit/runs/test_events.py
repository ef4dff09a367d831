"""Events: each is a row of the ledger that is read back as it was, and none prints what a person cannot read."""

from __future__ import annotations

import dataclasses
import json

import pytest

from raytf.runs import events

NODE = "abcdef" * 9 + "ab"
SOME = (
    events.FaultEvent("node_lost", [1, 2], [NODE, "c" * 56], "workers were lost", retry=False),
    events.FaultEvent(),
    events.Hang(3, NODE, "10.0.0.3", 17, 40, "input", "stuck waiting for data", 31.0, "hangs/a.txt", {3: "f"}),
    events.Hang(node=NODE, address="10.0.0.3", pid=17, where="start", why="it was stopped while it started"),
    events.Slow(2, NODE, 3.04),
    events.Exclude(NODE, "workers failed on it 3 times within an hour"),
    events.Park(2, 3, "the cluster can run 3"),
    events.Resize(2, 1, "a node is about to go", preemption=True),
    events.Waiting(1, 2),
    events.Drain(NODE, 30.0),
    events.Drain(NODE),
    events.NoticeEvent(NODE, "spot interruption", 120.0),
    events.GroupStart(2, [NODE, "c" * 56]),
    events.WorkerLost(1, f"The actor died because its node {NODE} has died."),
    events.AttemptEvent(40, "memory", 2),
    events.Save(40, 41, 0.5),
    events.SaveFailed(40, 41, "disk is full"),
    events.Driver("started", 7, "head"),
    events.Driver("ended", outcome="finished"),
)


@pytest.mark.parametrize("event", SOME, ids=lambda event: event.kind)
def test_a_row_says_what_the_event_says_and_nothing_unreadable(event):
    row = json.loads(json.dumps({"time": 1.0, "kind": event.kind, **event.fields()}))
    text = events.describe(row)
    assert text == event.text
    assert "None" not in text
    assert NODE not in text
    assert not set(text.split()) & {"c" * 56}


def test_the_rows_of_the_ledger_have_the_names_that_they_always_had():
    rows = {type(event): set(event.fields()) for event in SOME}
    assert rows[events.FaultEvent] == {"cause", "ranks", "nodes", "text", "retry", "preemption"}
    assert rows[events.Slow] == {"rank", "node", "ratio"}
    assert rows[events.Resize] == rows[events.Park] == {"from", "to", "why", "preemption"}
    assert rows[events.Drain] == {"node", "deadline_seconds"}
    assert rows[events.GroupStart] == {"workers", "nodes"}
    assert rows[events.WorkerLost] == {"worker", "text"}
    assert events.Driver("ended", outcome="stopped", why="x").fields() == {
        "state": "ended",
        "outcome": "stopped",
        "text": "x",
    }
    hang = {"rank", "node", "address", "pid", "step", "where", "text", "seconds", "file", "stacks"}
    assert set(SOME[2].fields()) == hang
    # The status knows the step of a worker that has none.
    assert set(SOME[3].fields()) == hang - {"step"}


@pytest.mark.parametrize("event", SOME, ids=lambda event: event.kind)
def test_a_row_that_is_damaged_is_told_all_the_same(event):
    for about in dataclasses.fields(event):
        row = {"time": 1.0, "kind": event.kind, **event.fields(), about.metadata.get("row", about.name): object}
        assert isinstance(events.describe(row), str)
    assert NODE not in events.describe({"time": 1.0, "kind": event.kind, "of": NODE})
