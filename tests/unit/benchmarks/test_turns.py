"""benchmarks/: programs take turns, and a profile's operations become the parts of a step."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.step import profile as step_profile
from benchmarks.step import workers as distributed
from benchmarks.step.trace import COMPUTE, GAP, LOSS_SUM, PACK, SUM, UNPACK, UPDATE, Op, split, union
from benchmarks.turns import Conductor
from raytf.testing import environment

#: Two ranks in one process: one with a loop of its own, one that is called before each call of two steps.
RANKS = """
import sys, threading
from benchmarks.turns import Follower, follow

def called():
    follower = Follower(sys.argv[1], 1)
    while follower.before(2):
        done.append(2)

done = []
thread = threading.Thread(target=called)
thread.start()
for steps, answer in follow(sys.argv[1], 0):
    answer["mine"] = [steps, answer["way"]]
thread.join()
print("calls:", len(done))
"""
FAILS = "import sys; sys.exit('no such module: torch')"


def conductor(code: str, folder: Path) -> Conductor:
    command = [sys.executable, "-c", code, "{address}"]
    return Conductor("a program", command, 2, folder / "log", environment(PYTHONPATH=str(harness.ROOT)))


def test_all_ranks_do_each_turn_and_end_when_told(tmp_path: Path):
    with conductor(RANKS, tmp_path) as program:
        for steps, way in ((4, "a"), (6, "b")):
            answer = program.run(steps, way=way)
            assert answer["mine"] == [steps, way]
            assert answer["seconds"] > 0
            assert answer["cpu"] >= 0
    assert "calls: 5" in (tmp_path / "log").read_text()


def test_a_program_that_does_not_start_is_told_with_its_last_words(tmp_path: Path):
    with conductor(FAILS, tmp_path) as program, pytest.raises(RuntimeError, match="no such module: torch"):
        program.run(1)


def test_a_program_that_fails_once_is_started_again(tmp_path: Path):
    code = f"""
import pathlib, sys
seen = pathlib.Path({str(tmp_path / "seen")!r})
if not seen.exists():
    sys.exit(seen.touch() or "not yet")
{RANKS}"""
    command = [sys.executable, "-c", code, "{address}"]
    around = environment(PYTHONPATH=str(harness.ROOT))
    with contextlib.ExitStack() as stack:
        program = Conductor.started(stack, "a program", command, 2, tmp_path / "log", around)
        assert program.run(2, way="a")["mine"] == [2, "a"]


def test_a_peer_whose_package_is_absent_is_skipped_with_a_note():
    known = {"there": ("json", "peers/a.py", 1.0), "away": ("no_such_package", "peers/b.py", 1.0)}
    report = harness.Report("a", "b")
    assert list(distributed.programs([], 2, report, known)) == ["raytf", "raytf, exact", "there"]
    assert "away: skipped, no_such_package is not installed" in report.notes[0]
    assert "there" not in distributed.programs(["there"], 2, report, known)


def test_the_operations_of_a_profile_become_the_parts_of_a_step():
    one = [
        ("net/Cast", "Cast", 0, 1),
        ("sequential/conv/Relu", "_FusedConv2D", 1, 3),
        ("gradient_tape/sequential/conv/Filter", "Conv2DBackpropFilter", 2, 5),
        ("concat", "ConcatV2", 5, 6),
        ("adam/CollectiveReduceV2", "CollectiveReduceV2", 6, 8),
        ("adam/split", "SplitV", 8, 9),
        ("CollectiveReduceV2", "CollectiveReduceV2", 9, 12),
        ("adam/Mul", "Mul", 10, 13),
    ]
    ops = [Op(node, kind, 20 * s + begin, 20 * s + end) for s in range(4) for node, kind, begin, end in one]
    steps = split(ops, 4)
    assert [step.seconds for step in steps] == [20, 20]
    expected = {COMPUTE: 4, PACK: 2, SUM: 2, UNPACK: 1, LOSS_SUM: 3, UPDATE: 3, GAP: 7}
    assert {kind: steps[0].total(kind) for kind in expected} == expected
    # All time is told: of the update, one second is beside nothing else.
    assert sum(seconds for kind, seconds in expected.items() if kind != UPDATE) + 1 == 20
    drawing = step_profile.picture("a & b", steps, 21.0)
    assert "a &amp; b: one step of rank 0, 20000.0 ms" in drawing
    assert ">forward and backward<" in drawing


def test_a_profile_whose_steps_cannot_be_told_apart_is_refused():
    with pytest.raises(ValueError, match="3 times 'net/Conv'"):
        split([Op("net/Conv", "Conv2D", t, t + 1) for t in range(3)], 2)


def test_intervals_that_touch_are_one():
    assert union([(3, 4), (0, 1), (1, 2), (0.5, 0.7)]) == [(0, 2), (3, 4)]
