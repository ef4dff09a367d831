"""What all benchmarks share: ratios, goals, turns, and programs that take turns."""

from __future__ import annotations

import dataclasses
import os
import sys
import textwrap

import pytest

from benchmarks import harness, turns
from benchmarks.harness import Comparison, Reading, Report


@pytest.mark.parametrize(
    ("ours", "theirs", "more", "goal", "ratios", "reached"),
    [
        ([3.0, 4.0, 5.0], [2.0, 2.0, 2.0], True, None, [1.5, 2.0, 2.5], None),
        ([3.0, 4.0, 5.0], [2.0, 2.0, 2.0], True, 2.0, [1.5, 2.0, 2.5], True),
        ([3.0, 4.0, 5.0], [2.0, 2.0, 2.0], True, 2.1, [1.5, 2.0, 2.5], False),
        # Seconds: half of the peer's is twice as good.
        ([1.0, 2.0], [2.0, 2.0], False, 1.5, [2.0, 1.0], True),
        ([1.0, 2.0], [2.0, 2.0], False, 1.6, [2.0, 1.0], False),
    ],
)
def test_a_ratio_tells_how_many_times_as_good_raytf_is(ours, theirs, more, goal, ratios, reached):
    row = Comparison("a model", "a peer", "s", ours, theirs, more, goal)
    assert row.ratios == ratios
    assert row.reached is reached


def test_a_pair_without_its_other_half_is_an_error():
    with pytest.raises(ValueError, match="zip"):
        _ = Comparison("a model", "a peer", "s", [1.0, 2.0], [1.0]).ratios


@pytest.mark.parametrize(
    ("limits", "reached"),
    [
        ({}, None),
        ({"at_least": 2.0}, True),
        ({"at_least": 2.1}, False),
        ({"at_most": 2.0}, True),
        ({"at_most": 1.9}, False),
        ({"at_least": 1.0, "at_most": 1.9}, False),
    ],
)
def test_a_reading_is_judged_by_its_median(limits, reached):
    assert Reading("a model", "stall", "s", [9.0, 2.0, 1.0], **limits).reached is reached


def test_turns_alternate_who_is_first():
    said = []

    def tell(name, values):
        return lambda: said.append(name) or values.pop(0)

    ours, theirs = harness.turns(3, tell("A", [1.0, 2.0, 3.0]), tell("B", [4.0, 5.0, 6.0]))
    assert "".join(said) == "ABBAAB"
    assert (ours, theirs) == ([1.0, 2.0, 3.0], [4.0, 5.0, 6.0])


def test_rounds_go_forth_and_back():
    said = []
    found = harness.rounds(3, {name: lambda name=name: said.append(name) or float(len(said)) for name in "ABC"})
    assert "".join(said) == "ABCCBAABC"
    assert found == {"A": [1.0, 6.0, 7.0], "B": [2.0, 5.0, 8.0], "C": [3.0, 4.0, 9.0]}


def test_a_report_is_read_as_it_was_written(tmp_path, capsys):
    report = Report("sample", "A sample")
    report.comparisons.append(Comparison("MLP", "Keras fit", "steps/s", [10.0, 12.0], [8.0, 8.0], goal=1.0))
    report.readings.append(Reading("MLP", "memory", "MB", [1234.0], at_most=1000.0))
    report.grids.append(harness.Grid("Another table", ["a", "b"], [["1", "2"]]))
    report.notes.append("torch is absent")
    path = tmp_path / "sample.json"
    assert report.finish(path) == 0
    again = Report.read(path)
    assert dataclasses.asdict(again) == dataclasses.asdict(report)
    assert again.machine["cores"] == os.cpu_count()
    out = capsys.readouterr().out
    assert "≥ 1 reached" in out
    assert "≤ 1,000 missed" in out
    assert "│ 1 │ 2 │" in out
    assert "torch is absent" in out


RANK = """
    import sys
    from benchmarks.turns import follow

    address, rank = sys.argv[1], int(sys.argv[2])
    for steps, answer in follow(address, rank):
        if steps == 13 and rank == 1:
            print("no more of this", flush=True)
            sys.exit(1)
        answer["sum"] = sum(range(steps))
"""
LAUNCH = "import subprocess, sys; [p.wait() for p in [subprocess.Popen([*sys.argv[1:], str(r)]) for r in range(2)]]"


def conductor(tmp_path, program, ranks=2):
    script = tmp_path / "rank.py"
    script.write_text(textwrap.dedent(program))
    path = os.pathsep.join([str(harness.ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-c", LAUNCH, sys.executable, str(script), "{address}"]
    return turns.Conductor("the program", command, ranks, tmp_path / "log", os.environ | {"PYTHONPATH": path})


def test_all_ranks_of_a_program_do_a_block(tmp_path):
    with conductor(tmp_path, RANK) as program:
        first, second = program.run(4), program.run(10)
        rate = program.rate(5)
    assert (first["sum"], second["sum"]) == (6, 45)
    assert 0 < first["seconds"] < 60
    assert rate > 0
    assert program._process.poll() == 0  # its ranks went when there was no more to do


def test_a_rank_that_dies_is_named_with_the_end_of_its_log(tmp_path):
    with conductor(tmp_path, RANK) as program:
        program.run(2)
        with pytest.raises(RuntimeError, match=r"(?s)rank 1 of the program has gone:.*no more of this"):
            program.run(13)


def test_a_program_that_does_not_start_is_told_with_its_log(tmp_path):
    with (
        conductor(tmp_path, "raise SystemExit('cannot find my data')") as program,
        pytest.raises(RuntimeError, match=r"(?s)the program did not start:.*cannot find my data"),
    ):
        program.wait()
