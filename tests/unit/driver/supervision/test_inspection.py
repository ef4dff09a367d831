"""Processes and nodes, looked at from outside: real processes, stopped, busy and idle; real sockets."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil

from raytf.driver.supervision import inspection
from raytf.driver.supervision.inspection import HangEvidence
from raytf.testing.processes import wait_until

SLEEPER = """
import faulthandler, os, time
from raytf.training.process.heartbeat import STACKS_SIGNAL
file = os.memfd_create("raytf-stacks")
faulthandler.register(STACKS_SIGNAL, file, all_threads=True)
def sleep_for_ever():
    time.sleep(1000)
print(file, flush=True)
sleep_for_ever()
"""


@contextlib.contextmanager
def process(code: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as made:
        try:
            yield made
        finally:
            made.kill()


def test_a_sleeping_process_is_idle_and_shows_where_even_when_stopped():
    with process(SLEEPER) as made:
        assert made.stdout is not None
        file = int(made.stdout.readline())
        assert inspection.look([(3, made.pid, file)])[3].evidence is HangEvidence.IDLE
        assert "sleep_for_ever" in inspection.stacks(made.pid, file)
        # Where py-spy may not look into the process, the process writes them itself.
        assert "sleep_for_ever" in inspection._by_signal(made.pid, file)
        assert inspection._by_signal(made.pid, 0) == ""
        psutil.Process(made.pid).suspend()
        wait_until(lambda: psutil.Process(made.pid).status() == psutil.STATUS_STOPPED, "it is stopped", 10)
        found = inspection.look([(3, made.pid, file)])[3]
        assert found.evidence is HangEvidence.STOPPED
        assert "sleep_for_ever" in found.stacks
        inspection.kill(made.pid)
        assert made.wait(10) < 0
        inspection.kill(made.pid)


def test_a_process_that_computes_is_busy_and_one_that_is_gone_is_gone():
    with process("print(1, flush=True)\nwhile True: pass") as made:
        assert made.stdout is not None
        made.stdout.readline()
        # On a loaded machine it may get no share of a core for a while.
        wait_until(lambda: inspection.state(made.pid) is HangEvidence.BUSY, "a process that computes is busy", 120)
        made.kill()
        wait_until(lambda: psutil.Process(made.pid).status() == psutil.STATUS_ZOMBIE, "it is dead", 10)
        assert inspection.state(made.pid) is HangEvidence.GONE  # not reaped yet
        made.wait(10)
        assert inspection.look([(0, made.pid, -1)])[0].evidence is HangEvidence.GONE


def test_own_process_is_not_idle_while_it_computes():
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        wait_until(lambda: inspection.state(os.getpid()) is HangEvidence.BUSY, "a process that computes is busy", 120)
    finally:
        over.set()
        thread.join()


def test_at_a_glance_only_a_process_that_cannot_go_on_is_noticed():
    code = "import time; time.sleep(1000)"
    with process(code) as sleeping, process(code) as stopped, process(code) as gone:
        psutil.Process(stopped.pid).suspend()
        gone.kill()
        wait_until(lambda: inspection.at_a_glance(gone.pid) is HangEvidence.GONE, "it is dead", 10)
        gone.wait(10)
        assert inspection.at_a_glance(gone.pid) is HangEvidence.GONE
        wait_until(lambda: inspection.at_a_glance(stopped.pid) is HangEvidence.STOPPED, "it is stopped", 10)
        assert inspection.at_a_glance(sleeping.pid) is None
        assert inspection.look([(0, sleeping.pid, -1)], has_stacks=False)[0].stacks == "not requested"
