"""What the benchmarks under faults count, on notes that were made by hand, and which faults they play."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from benchmarks.recovery import fault_trace, recovery
from benchmarks.recovery.disturbed import Notes
from benchmarks.recovery.fault_play import account, steady
from benchmarks.recovery.fault_trace import Kind, Trace


def nodes_over_time(trace: Trace) -> list[tuple[float, int]]:
    changes = [(0.0, trace.nodes)]
    for event in trace.events:
        if event.kind is not Kind.WORKER:
            changes.append((event.at + event.seconds, 1 if event.kind is Kind.JOIN else -1))
    changes.sort()
    return list(zip((at for at, _ in changes), itertools.accumulate(n for _, n in changes), strict=True))


def test_drawn_faults_are_the_same_for_a_seed_and_leave_a_node():
    trace = fault_trace.drawn(3, 1200)
    assert trace == fault_trace.drawn(3, 1200) != fault_trace.drawn(4, 1200)
    faults = [event for event in trace.events if event.kind is not Kind.JOIN]
    assert trace.faults == len(faults) >= 1200 // 120
    assert {event.kind for event in faults} == {Kind.WORKER, Kind.NODE, Kind.NOTICE}
    assert all(60 <= later.at - sooner.at <= 120 for sooner, later in itertools.pairwise(faults))
    assert min(nodes for _, nodes in nodes_over_time(trace)) >= 1


def test_the_spot_trace_gives_one_to_three_nodes_in_the_time_that_is_wanted():
    counts = fault_trace.read(fault_trace.SPOT_TRACE)
    trace = fault_trace.replayed(counts, 360)
    assert trace.nodes == 3
    assert trace.seconds == 360
    assert trace.faults == 8
    times = nodes_over_time(trace)
    assert {nodes for _, nodes in times} <= {1, 2, 3}
    assert times[-1][0] < 360
    scale = (counts[-1][0] - counts[0][0]) / 360
    late = [event for event in trace.events if event.kind is Kind.NOTICE and event.at > 0]
    assert {round(event.seconds * scale) for event in late} == {120}


@pytest.fixture
def notes(tmp_path: Path) -> Notes:
    """Steps of 1 s with two workers to 10, a loss of 4 of them, 6 s of restart, and steps of 0.5 s with one worker."""
    lines = ["mark:processes 99.5", "begin 100 2", *(f"{n} {100 + n}" for n in range(1, 11))]
    lines += ["mark:notice 111", "mark:processes 114", "begin 116 1"]
    lines += [f"{6 + n} {116 + n / 2}" for n in range(1, 13)]
    path = tmp_path / "notes"
    path.write_text("\n".join(lines) + "\n19 12")  # the last line is being written
    return Notes(path)


def test_time_counts_where_it_made_new_steps(notes: Notes):
    groups = notes.groups()
    assert [(group.began, group.workers, len(group.calls)) for group in groups] == [(100, 2, 10), (116, 1, 12)]
    assert notes.reached == 18
    assert steady(groups) == {2: 1.0, 1: 0.5}
    found = account(groups, 100.5, 122.5, steady(groups))
    assert (found.new, found.redone) == (18, 4)
    assert found.goodput == pytest.approx((10 * 1.0 + 8 * 0.5) / 22)
    assert found.training == pytest.approx((9.5 + 8 * 0.5) / 22)
    later = account(groups, 110.5, 122.5, steady(groups))
    assert (later.new, later.redone) == (8, 4)


def test_notes_are_read_on_from_where_they_ended(tmp_path: Path):
    path = tmp_path / "notes"
    notes = Notes(path)
    assert notes.groups() == []
    with path.open("a") as out:
        for text in ("begin 1 2\n1 ", "2.0\n2 3.0\n", "mark:notice 4.0\n"):
            out.write(text)
            out.flush()
            notes.groups()
    assert [group.calls for group in notes.groups()] == [[(1, 2.0), (2, 3.0)]]
    assert notes.all_marks == [("notice", 4.0)]


def test_a_peer_s_faults_stand_beside_those_of_the_same_round():
    def recovered(program: str, round: int, seconds: float) -> recovery.Recovery:
        return recovery.Recovery(program, round, "worker", 1, 0, 0, seconds, 0, "memory", 0, {}, seconds)

    ours = [recovered("raytf", r, s) for r, s in ((0, 4), (0, 6), (0, 5), (1, 9))]
    theirs = [recovered("often", r, s) for r, s in ((0, 10), (1, 30), (1, 40), (2, 50))]
    assert recovery.paired(ours, theirs) == [(5, 10), (9, 30)]
