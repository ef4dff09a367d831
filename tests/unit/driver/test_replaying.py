"""A program that is started to compute steps again: which of its runs, and with which settings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import raytf
from raytf.driver import recomputing, replaying
from raytf.driver.replaying import ReplayPlan
from raytf.errors import ConfigError
from raytf.runs import start_command
from raytf.runs.start_command import StartCommand
from raytf.storage.storage import Storage


def test_only_the_run_that_is_asked_for_is_computed_again(tmp_path: Path):
    plan = ReplayPlan(str(tmp_path / "a"), 70, 3, "/scratch")
    config = raytf.TrainConfig.of(storage=str(tmp_path), run="a")
    assert replaying.asked(config, plan.told()) == plan
    assert replaying.asked(config.replace(run="b"), plan.told()) is None
    assert replaying.asked(config, {}) is None


def test_what_is_learned_is_not_changed_by_the_settings():
    config = raytf.TrainConfig.of(track="x.jsonl", keep_best="loss", workers="2:8", exact=True, seed=3, epochs=7)
    found = replaying.settings(ReplayPlan("r", 70, 3, "/scratch"), config)
    changed = {name for name, value in found.values.items() if value != config.values[name]}
    assert changed == {"storage", "run", "workers", "track", "keep_best", "warm_workers"}
    mirrored = raytf.TrainConfig.of(strategy="mirrored")
    assert replaying.settings(ReplayPlan("r", 70, 1, "/s"), mirrored).cluster.workers is None


def test_the_ray_of_a_program_has_room_for_who_computes_again():
    config = raytf.TrainConfig.of(workers="2")
    assert replaying.with_room(config, {}) == config
    assert replaying.with_room(config, ReplayPlan("r", 70, 3, "/s").told()).worker_range == (3, 3)
    mirrored = raytf.TrainConfig.of(strategy="mirrored")
    assert replaying.with_room(mirrored, ReplayPlan("r", 70, 1, "/s").told()) == mirrored


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
        recomputing.words_of(run, "", "raytf replay a --step 7")
    assert text in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert recomputing.words_of(run, "python mine.py -x", "raytf replay a") == [sys.executable, "mine.py", "-x"]


@pytest.mark.parametrize("content", [None, b"not json", b'{"words": 3, "folder": []}'])
def test_a_folder_without_a_readable_command_says_so(tmp_path: Path, content: bytes | None):
    run = Storage(str(tmp_path / "run"))
    if content is not None:
        run.put(start_command.FILE, content)
    with pytest.raises(ConfigError, match="does not record which command started it"):
        recomputing.words_of(run, "", "raytf prove a")


@pytest.mark.parametrize(
    ("program", "says"),
    [
        ("it's", "cannot be read: No closing quotation"),
        ("nosuch-command x", "nosuch-command cannot be run: No such file"),
    ],
)
def test_a_command_that_cannot_be_run_is_one_clear_error(tmp_path: Path, program: str, says: str):
    plan = ReplayPlan(str(tmp_path / "a"), 7, 1, str(tmp_path))
    with pytest.raises(ConfigError, match=says):
        recomputing.compute(recomputing.words_of(Storage(plan.run), program, "raytf replay a"), plan)


def test_another_run_of_the_program_is_not_trained(tmp_path: Path):
    run = Storage(str(tmp_path / "other"))
    told = ReplayPlan(str(tmp_path / "a"), 7, 1, str(tmp_path)).told()
    replaying.check_other(run, {})
    with pytest.raises(ConfigError, match="which has not finished, before it comes to the run"):
        replaying.check_other(run, told)
    run.put("result.json", b"{}")
    replaying.check_other(run, told)
