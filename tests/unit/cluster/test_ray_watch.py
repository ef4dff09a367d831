"""A driver leaves when what it needs has died: who is missed when, and how the process ends."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
import time

import pytest

from raytf.cluster import ray_watch
from raytf.testing.processes import free_port, wait_until

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


@pytest.mark.parametrize("reap", [True, False])
def test_a_process_is_missed_at_once(reap: bool):
    said: list[ray_watch.Loss] = []
    with (
        subprocess.Popen(SLEEP) as process,
        ray_watch.RayWatch([ray_watch.WatchedProcess("it", process.pid, True)], said.append),
    ):
        time.sleep(0.2)
        assert said == []
        began = time.monotonic()
        process.kill()
        if reap:
            process.wait(30)
        wait_until(lambda: said, "it is missed", 30)
        assert time.monotonic() - began < 5
    assert said == [ray_watch.Loss(f"it (pid {process.pid}) has died", False)]


def test_one_that_has_died_is_missed_at_the_end_of_a_statement_too():
    said: list[ray_watch.Loss] = []
    process = subprocess.Popen(SLEEP)
    process.kill()
    process.wait()
    with ray_watch.RayWatch([ray_watch.WatchedProcess("it", process.pid, True)], said.append):
        pass
    assert said == [ray_watch.Loss(f"it (pid {process.pid}) has died", False)]


def test_a_port_may_be_closed_for_a_while():
    import socket

    now = [0.0]
    port = free_port()
    sign = ray_watch.WatchedPort("the GCS", f"127.0.0.1:{port}", 45, lambda: now[0])

    def after(seconds: float) -> str | None:
        now[0] += seconds
        loss = sign()
        return None if loss is None else loss.text

    assert [after(5) for _ in range(8)] == [None] * 8
    with socket.create_server(("127.0.0.1", port)):
        assert after(4) is None
    assert [after(5) for _ in range(8)] == [None] * 8
    assert after(5) == "the GCS has not answered for 45 s"


@pytest.mark.parametrize(("reconnect", "seconds"), [(60, 45), (300, 285), (10, 5)])
def test_a_driver_leaves_before_ray_ends_it(reconnect: float, seconds: float):
    assert ray_watch.patience(reconnect) == seconds


SCRIPT = """
    import os, subprocess, sys, threading, time
    from raytf.cluster import ray_watch
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    def broken(what):
        raise RuntimeError(what)
    def farewell(what):
        os.write(2, b"what Ray says of it\\n")
        print("also here", file=sys.stderr)
        print("and here")
        print("what the user shall see", file=shown, flush=True)
        return "the workers saved first"
    shown = sys.stdout
    with ray_watch.RayWatch([ray_watch.WatchedProcess("its Ray", process.pid, True)]):
        with ray_watch.farewell(broken), ray_watch.farewell(farewell):
            process.kill()
            time.sleep(600)
"""


def test_the_process_ends_with_one_line():
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(SCRIPT)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 75
    assert run.stderr.startswith("error: its Ray (pid ")
    assert run.stderr.endswith(
        ") has died; the workers saved first. The same command continues where this one stopped.\n"
    )
    assert run.stderr.count("\n") == 1
    assert run.stdout == "what the user shall see\n"


def test_no_thread_stays():
    with ray_watch.RayWatch([]):
        pass
    assert "raytf-vigil" not in {thread.name for thread in threading.enumerate()}
