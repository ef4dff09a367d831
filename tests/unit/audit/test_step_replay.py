"""A program that is started to compute steps again: which of its runs, and with which settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import raytf
from raytf.audit import step_replay
from raytf.audit.step_replay import NotedSteps, ReplayPlan, StepComparison
from raytf.commands import replay
from raytf.distributed.step_digest import Difference, DigestKind, DigestLayout
from raytf.errors import ConfigError
from raytf.runs import start_command
from raytf.runs.digest_log import DigestSegment, RunDigests
from raytf.runs.start_command import StartCommand
from raytf.storage.storage import Storage

LAYOUT = DigestLayout(2, ("kernel", "bias"))


def test_only_the_run_that_is_asked_for_is_computed_again(tmp_path: Path):
    plan = ReplayPlan(str(tmp_path / "a"), 70, 3, "/scratch")
    config = raytf.TrainConfig.of(storage=str(tmp_path), run="a")
    assert step_replay.requested(config, plan.environment()) == plan
    assert step_replay.requested(config.replace(run="b"), plan.environment()) is None
    assert step_replay.requested(config, {}) is None


def test_what_is_learned_is_not_changed_by_the_settings():
    config = raytf.TrainConfig.of(track="x.jsonl", keep_best="loss", workers="2:8", exact=True, seed=3, epochs=7)
    found = step_replay.replay_settings(ReplayPlan("r", 70, 3, "/scratch"), config)
    changed = {name for name, value in found.values.items() if value != config.values[name]}
    assert changed == {"storage", "run", "workers", "track", "keep_best", "warm_workers"}
    mirrored = raytf.TrainConfig.of(strategy="mirrored")
    assert step_replay.replay_settings(ReplayPlan("r", 70, 1, "/s"), mirrored).cluster.workers is None


def test_the_ray_of_a_program_has_room_for_who_computes_again():
    config = raytf.TrainConfig.of(workers="2")
    assert step_replay.with_room(config, {}) == config
    assert step_replay.with_room(config, ReplayPlan("r", 70, 3, "/s").environment()).worker_range == (3, 3)
    mirrored = raytf.TrainConfig.of(strategy="mirrored")
    assert step_replay.with_room(mirrored, ReplayPlan("r", 70, 1, "/s").environment()) == mirrored


def test_the_command_of_a_process_is_kept_and_found(tmp_path: Path):
    script = tmp_path / "job.py"
    script.write_text(
        "import json, sys\nfrom raytf.runs import start_command\n"
        "found = start_command.of_process()\nprint(json.dumps([found.words, found.folder]))\n"
    )
    told = subprocess.run([sys.executable, "job.py", "--x", "1 2"], cwd=tmp_path, capture_output=True, check=True)
    assert json.loads(told.stdout) == [["job.py", "--x", "1 2"], str(tmp_path)]
    run = Storage(str(tmp_path / "run"))
    assert start_command.read(run) is None
    command = StartCommand(("job.py", "--x", "1 2"), str(tmp_path))
    start_command.write(run, command)
    assert start_command.read(run) == command


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("job.py", "--x", "1 2"), "python job.py --x '1 2'"),
        (("/venv/bin/raytf", "run", "a.py"), "raytf run a.py"),
        (("-c", "import os"), "python -c 'import os'"),
        (("/tmp/\x1b[2Jevil.py",), "python"),
        (("raytf", "submit", "http://stranger", "--", "x"), "raytf submit http://stranger -- x"),
        ((), "python"),
    ],
)
def test_the_recorded_command_is_shown_and_never_run(tmp_path: Path, words: tuple[str, ...], text: str):
    run = Storage(str(tmp_path / "run"))
    start_command.write(run, StartCommand(words, str(tmp_path)))
    with pytest.raises(ConfigError, match=r"raytf replay a --step 7 -- python train.py\.") as caught:
        step_replay.words_of(run, "", "raytf replay a --step 7")
    assert text in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert step_replay.words_of(run, "python mine.py -x", "raytf replay a") == [sys.executable, "mine.py", "-x"]


@pytest.mark.parametrize("content", [None, b"not json", b'{"words": 3, "folder": []}'])
def test_a_folder_without_a_readable_command_says_so(tmp_path: Path, content: bytes | None):
    run = Storage(str(tmp_path / "run"))
    if content is not None:
        run.put(start_command.FILE, content)
    with pytest.raises(ConfigError, match="does not record which command started it"):
        step_replay.words_of(run, "", "raytf prove a")


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("it's", "cannot be parsed: No closing quotation"),
        ("nosuch-command x", "nosuch-command cannot be run: No such file"),
    ],
)
def test_a_command_that_cannot_be_run_is_one_clear_error(tmp_path: Path, program: str, says: str):
    plan = ReplayPlan(str(tmp_path / "a"), 7, 1, str(tmp_path))
    with pytest.raises(ConfigError, match=says):
        step_replay.compute(step_replay.words_of(Storage(plan.run), program, "raytf replay a"), plan)


def test_another_run_of_the_program_is_not_trained(tmp_path: Path):
    run = Storage(str(tmp_path / "other"))
    told = ReplayPlan(str(tmp_path / "a"), 7, 1, str(tmp_path)).environment()
    step_replay.check_other_run(run, {})
    with pytest.raises(ConfigError, match="which has not finished, before the run"):
        step_replay.check_other_run(run, told)
    run.put("result.json", b"{}")
    step_replay.check_other_run(run, told)


# -- test step comparison ----------------------------------------------------------------------------------------------


def digests(steps: int, layout: DigestLayout = LAYOUT, first: int = 1) -> RunDigests:
    rows = 1 + np.arange(steps * layout.bytes, dtype=np.uint8).reshape(steps, layout.bytes) % 200
    return RunDigests([DigestSegment(first, layout, rows)])


def compare(noted: RunDigests, again: RunDigests, steps: range) -> StepComparison:
    return step_replay.compare_steps(NotedSteps(noted), NotedSteps(again), steps)


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
    assert "an older raytf computed the digests of one of the two" in older.why
    shards = compare(digests(9), digests(9, DigestLayout(4, ("kernel", "bias"))), range(1, 3))
    assert "2 logical shards, but the program requests 4" in shards.why
    model = compare(digests(9), digests(9, DigestLayout(2, ("kernel", "more"))), range(1, 3))
    assert model.why.endswith("other weights than the run's model: more")


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
    found = step_replay.compare_steps(NotedSteps(none, noted), NotedSteps(none, again), range(1, 4))
    assert (found.same, found.unknown, found.differs, found.losses) == (0, 3, None, expected[0])
    assert str(found.farthest) == str(expected[1])  # NaN is not equal to itself
    assert found.is_same == (expected[1] is None)


def test_nothing_is_the_same_where_nothing_was_compared():
    none = NotedSteps(RunDigests([]))
    assert not step_replay.compare_steps(none, none, range(1, 4)).is_same


@pytest.mark.parametrize(
    ("found", "lines"),
    [
        (StepComparison(1, 0), ["step 8 is the same, bit for bit"]),
        (StepComparison(4, 0), ["4 steps, up to step 8, are the same, bit for bit"]),
        (
            StepComparison(2, 0, 7, Difference((1,), ("kernel",))),
            ["2 steps after step 4 are the same; step 7 differs from the run's records"]
            + ["  shards: 1", "  tensors: kernel"],
        ),
        (
            StepComparison(0, 0, 5, Difference(tuple(range(9)), ())),
            ["step 5 differs from the run's records", "  shards: 0, 1, 2, 3, 4, 5, 6, 7 ..."]
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
            + ["  their losses differ, most in step 8: 0.5 was recorded, 0.25 was computed"],
        ),
    ],
)
def test_what_was_found_is_told(found: StepComparison, lines: list[str]):
    assert replay.comparison_lines(found, 4, 8) == lines
