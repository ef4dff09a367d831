"""Warm processes: how many, where, and when a node is asked for them; the files by which they are counted."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from ray import cloudpickle

from raytf.driver.ray_train.warm_processes import Schedule, spare_nodes
from raytf.training.process import warm_pool
from raytf.training.process.warm_pool import PROCESS_BYTES, SPARE_BYTES, WarmProcesses, _make_hook, missing

PLENTY = 1 << 40


@pytest.mark.parametrize(
    ("workers", "warm", "free", "count"),
    [
        (2, 0, PLENTY, 2),
        (2, 1, PLENTY, 1),
        (2, 2, PLENTY, 0),
        (1, 3, PLENTY, 0),
        (2, 0, SPARE_BYTES + 2 * PROCESS_BYTES, 2),
        (2, 0, SPARE_BYTES + 2 * PROCESS_BYTES - 1, 0),
        (2, 1, SPARE_BYTES + PROCESS_BYTES, 1),
    ],
)
def test_as_many_as_workers_where_memory_allows(workers: int, warm: int, free: int, count: int):
    found, why = missing(workers, warm, free)
    assert found == count
    assert bool(why) == (found < workers - warm)


def test_a_node_that_has_them_needs_no_more_memory():
    assert missing(2, 2, 0) == (0, "")


def test_the_reason_says_what_is_free_and_what_would_be_needed():
    why = missing(2, 0, 3 << 30)[1]
    assert why == "3.0 GiB of its memory are free, and 2 would need 1.4 GiB in addition to 2 GiB that must stay free"


class TestShelf:
    def test_a_process_that_was_not_asked_for_gets_nothing(self, tmp_path: Path):
        shelf = WarmProcesses(tmp_path / "shelf")
        assert shelf.claim(os.getpid()) is None
        assert shelf.count() == 0

    def test_asked_claimed_used(self, tmp_path: Path):
        shelf = WarmProcesses(tmp_path / "shelf")
        shelf.ask(2)
        assert shelf.count() == 2
        assert shelf.claim(os.getpid()) == 0
        assert shelf.count() == 2
        assert shelf.leave(os.getpid())
        assert shelf.count() == 1
        assert not shelf.leave(os.getpid())

    def test_only_as_many_as_were_asked_for_can_be_claimed(self, tmp_path: Path):
        shelf = WarmProcesses(tmp_path / "shelf")
        shelf.ask(1)
        assert [shelf.claim(pid) for pid in (os.getpid(), os.getppid())] == [0, None]

    def test_a_process_is_told_at_which_priority_to_import(self, tmp_path: Path):
        shelf = WarmProcesses(tmp_path / "shelf")
        shelf.ask(1, nice=10)
        assert shelf.claim(os.getpid()) == 10

    def test_a_request_is_open_until_its_process_imports(self, tmp_path: Path):
        now = time.monotonic()
        shelf = WarmProcesses(tmp_path / "shelf", lambda: now)
        assert not shelf.is_starting()
        shelf.ask(1)
        assert shelf.is_starting()
        shelf.claim(os.getpid())
        assert not shelf.is_starting()
        shelf.ask(1)
        now += 61
        assert not shelf.is_starting()

    def test_one_that_does_not_come_is_forgotten(self, tmp_path: Path):
        now = time.monotonic()
        shelf = WarmProcesses(tmp_path / "shelf", lambda: now)
        shelf.ask(1)
        now += 30
        assert shelf.count() == 1
        now += 60
        assert shelf.count() == 0
        assert shelf.claim(os.getpid()) is None

    def test_one_that_died_is_forgotten(self, tmp_path: Path):
        shelf = WarmProcesses(tmp_path / "shelf")
        with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
            shelf.ask(1)
            assert shelf.claim(process.pid) == 0
            assert shelf.count() == 1
            process.kill()
        assert shelf.count() == 0

    def test_a_younger_process_of_the_same_number_is_another(self, tmp_path: Path):
        shelf = WarmProcesses(tmp_path / "shelf")
        shelf.ask(1)
        assert shelf.claim(os.getpid()) == 0
        (tmp_path / "shelf" / str(os.getpid())).write_text("1")
        assert shelf.count() == 0

    @pytest.mark.parametrize("jump", [-3600, 3600])
    def test_a_clock_that_is_set_changes_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jump: int):
        shelf, now = WarmProcesses(tmp_path / "shelf"), time.time() + jump
        shelf.ask(2)
        assert shelf.claim(os.getpid()) == 0
        monkeypatch.setattr(time, "time", lambda: now)
        monkeypatch.setattr(psutil.Process, "create_time", lambda process: now)  # which is counted from this clock
        assert shelf.count() == 2
        monkeypatch.setattr(warm_pool, "started_warm", True)
        monkeypatch.setattr(warm_pool, "_NEW_SECONDS", 3000.0)
        assert warm_pool.is_new()
        monkeypatch.setattr(warm_pool, "_NEW_SECONDS", 0.0)
        assert not warm_pool.is_new()


class TestSchedule:
    def test_a_node_without_processes_is_asked_soon_and_one_with_them_later(self):
        now = 0.0
        schedule = Schedule(lambda: now)
        assert schedule.due(["a", "b"]) == ["a", "b"]
        schedule.answered("a", False)
        schedule.answered("b", True)
        now = 3.0
        assert schedule.due(["a", "b"]) == ["a"]
        schedule.answered("a", True)
        now = 61.0
        assert schedule.due(["a", "b"]) == ["b"]

    def test_who_does_not_answer_is_asked_again_after_a_while(self):
        now = 0.0
        schedule = Schedule(lambda: now)
        assert schedule.due(["a"]) == ["a"]
        now = 29.0
        assert schedule.due(["a"]) == []
        now = 31.0
        assert schedule.due(["a"]) == ["a"]

    def test_a_new_group_is_asked_at_once(self):
        schedule = Schedule(lambda: 0.0)
        assert schedule.due(["a"]) == ["a"]
        schedule.answered("a", True)
        schedule.restart()
        assert schedule.due(["a"]) == ["a"]


@pytest.mark.parametrize(
    ("room", "group", "spares"),
    [
        ({"a": 0, "b": 0, "c": 1}, {"a": 1, "b": 1}, {"c": 1}),
        ({"c": 4, "d": 4}, {"a": 2, "b": 1}, {"c": 2}),
        ({"c": 1, "d": 0, "e": 4}, {"a": 3}, {"c": 1, "e": 2}),
        ({"a": 4}, {"a": 2}, {}),
        ({}, {"a": 2}, {}),
        ({"c": 4}, {}, {}),
    ],
)
def test_spare_nodes_are_enough_for_the_node_that_runs_most(room, group, spares):
    assert spare_nodes(room, group) == spares


def test_the_hook_does_no_harm_where_raytf_is_not_found(tmp_path: Path):
    (tmp_path / "hook").write_bytes(
        cloudpickle.dumps(_make_hook([str(tmp_path)], None, "raytf.training.process.warm_pool", "get_warm"))
    )
    # Isolated: without PYTHONPATH and the present folder; and a raytf that cannot be imported stands in the way.
    (tmp_path / "raytf.py").write_text("raise ImportError('not this one')")
    code = f"from ray import cloudpickle; cloudpickle.load(open({str(tmp_path / 'hook')!r}, 'rb'))(); print('goes on')"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True, timeout=120)
    assert "goes on" in done.stdout, done.stderr
    assert "not this one" in done.stderr
