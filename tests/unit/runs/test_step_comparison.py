"""Steps that were computed again beside those that a run has noted."""

from __future__ import annotations

import numpy as np
import pytest

from raytf.commands import replay
from raytf.distributed.step_digest import Difference, DigestKind, DigestLayout
from raytf.runs import step_comparison
from raytf.runs.digest_log import DigestSegment, RunDigests
from raytf.runs.step_comparison import NotedSteps, StepComparison

LAYOUT = DigestLayout(2, ("kernel", "bias"))


def digests(steps: int, layout: DigestLayout = LAYOUT, first: int = 1) -> RunDigests:
    rows = 1 + np.arange(steps * layout.bytes, dtype=np.uint8).reshape(steps, layout.bytes) % 200
    return RunDigests([DigestSegment(first, layout, rows)])


def compare(noted: RunDigests, again: RunDigests, steps: range) -> StepComparison:
    return step_comparison.compare(NotedSteps(noted), NotedSteps(again), steps)


def changed(step: int, at: int) -> RunDigests:
    found = digests(9)
    found.segments[0].rows[step - 1, at] ^= 1
    return found


def test_equal_steps_are_the_same():
    assert compare(digests(9), digests(9), range(4, 8)) == StepComparison(4, 0)


@pytest.mark.parametrize(("at", "difference"), [(8, Difference((0,), (), 2)), (17, Difference((), ("bias",), 2))])
def test_the_first_step_that_differs_is_named(at: int, difference: Difference):
    assert compare(digests(9), changed(6, at), range(4, 9)) == StepComparison(2, 0, 6, difference)


def test_what_cannot_be_compared_is_said():
    found = compare(digests(5), digests(9), range(4, 8))
    assert found == StepComparison(2, 2, why="step 6 has no digest")
    device = compare(digests(9), digests(9, DigestLayout(2, ("kernel", "bias"), DigestKind.DEVICE)), range(1, 3))
    assert "computed on CPUs and this machine computes on GPUs" in device.why
    older = compare(digests(9, DigestLayout(2, ("kernel", "bias"), DigestKind.WHOLE)), digests(9), range(1, 3))
    assert "an older raytf made the digests of one of the two" in older.why
    shards = compare(digests(9), digests(9, DigestLayout(4, ("kernel", "bias"))), range(1, 3))
    assert "2 logical shards, and the program asks for 4" in shards.why
    model = compare(digests(9), digests(9, DigestLayout(2, ("kernel", "more"))), range(1, 3))
    assert model.why.endswith("other weights than that of the run: more")


NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("noted", "again", "expected"),
    [
        ({1: 0.5, 2: 0.25}, {1: 0.5, 2: 0.25}, (2, None)),
        ({1: 0.5, 2: 0.25}, {1: 0.5}, (1, None)),
        ({1: 0.5, 2: 0.25, 3: 8.0}, {1: 0.5, 2: 0.5, 3: 9.0}, (3, (2, 0.25, 0.5))),
        ({1: NAN, 2: INF, 3: 0.0}, {1: NAN, 2: INF, 3: -0.0}, (3, None)),
        ({1: 0.0, 2: NAN}, {1: 1.0, 2: 0.5}, (2, (2, NAN, 0.5))),
    ],
)
def test_losses_are_compared_where_there_are_no_digests(noted, again, expected):
    none = RunDigests([])
    found = step_comparison.compare(NotedSteps(none, noted), NotedSteps(none, again), range(1, 4))
    assert (found.same, found.unknown, found.differs, found.losses) == (0, 3, None, expected[0])
    assert str(found.farthest) == str(expected[1])  # NaN is not equal to itself
    assert found.is_same == (expected[1] is None)


def test_nothing_is_the_same_where_nothing_was_compared():
    none = NotedSteps(RunDigests([]))
    assert not step_comparison.compare(none, none, range(1, 4)).is_same


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        (StepComparison(1, 0), ["step 8 is the same, bit for bit"]),
        (StepComparison(4, 0), ["4 steps, up to step 8, are the same, bit for bit"]),
        (
            StepComparison(2, 0, 7, Difference((1,), ("kernel",))),
            ["2 steps after step 4 are the same; step 7 differs from what the run has noted"]
            + ["  shards: 1", "  tensors: kernel"],
        ),
        (
            StepComparison(0, 0, 5, Difference(tuple(range(9)), ())),
            ["step 5 differs from what the run has noted", "  shards: 0, 1, 2, 3, 4, 5, 6, 7 ..."]
            + ["  tensors: not known"],
        ),
        (StepComparison(0, 4, why="x"), ["4 steps cannot be compared bit by bit: x"]),
        (
            StepComparison(0, 4, why="x", losses=4),
            ["4 steps cannot be compared bit by bit: x", "  4 losses are the same"],
        ),
        (
            StepComparison(0, 1, why="x", losses=1, farthest=(8, 0.5, 0.25)),
            ["1 step cannot be compared bit by bit: x"]
            + ["  their losses differ, most in step 8: 0.5 was noted, 0.25 was computed"],
        ),
    ],
)
def test_what_was_found_is_told(found: StepComparison, lines: list[str]):
    assert replay.comparison_lines(found, 4, 8) == lines
