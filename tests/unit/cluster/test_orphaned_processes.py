"""What a driver leaves is ended by a guard: processes that carry its mark, stopped ones too, and no others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from raytf.cluster import orphaned_processes
from raytf.cluster.orphaned_processes import MARK, marked
from raytf.testing.processes import wait_until

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
DRIVER = """
    import os, subprocess, sys, time
    from raytf.cluster.orphaned_processes import MARK, OrphanGuard
    mark, folder, how = sys.argv[1:]
    guard = OrphanGuard(mark)
    guard.remove(folder)
    for _ in range(2):
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env={**os.environ, MARK: mark})
    if how == "over":
        guard.over()
    print("ready", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def stranger() -> Iterator[subprocess.Popen[bytes]]:
    """A process of another driver's Ray."""
    with subprocess.Popen(SLEEP, env={**os.environ, MARK: uuid.uuid4().hex}) as process:
        yield process
        process.kill()


@pytest.mark.parametrize("how", ["killed", "over"])
def test_what_carries_the_mark_is_ended_and_nothing_else(tmp_path: Path, stranger: subprocess.Popen[bytes], how: str):
    folder, mark = tmp_path / "scratch", uuid.uuid4().hex
    (folder / "deep").mkdir(parents=True)
    command = [sys.executable, "-c", textwrap.dedent(DRIVER), mark, str(folder), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        try:
            assert driver.stdout is not None
            assert driver.stdout.readline() == "ready\n"
            if how == "killed":
                wait_until(lambda: len(marked(mark)) == 2, "both have begun", 60)
                os.kill(marked(mark)[0], signal.SIGSTOP)
                driver.kill()
            wait_until(lambda: not marked(mark), "all are gone", 60)
            wait_until(lambda: not folder.exists(), "the folder is gone", 60)
        finally:
            driver.kill()
            orphaned_processes.end(mark)
    assert stranger.poll() is None


def test_a_process_dies_with_its_parent_though_it_is_stopped(tmp_path: Path):
    child = (
        "import os, time; from raytf.cluster.orphaned_processes import die_with_parent; die_with_parent(); "
        "print(os.getpid(), flush=True); time.sleep(600)"
    )
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        process.kill()

    def is_gone() -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    try:
        wait_until(is_gone, "the child is gone", 30)
    finally:
        if not is_gone():
            os.kill(pid, signal.SIGKILL)
