"""A real `raytf ui` process: a header without an end, strange names, and Ctrl-C while a page is open."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import requests

from raytf.runs.lease import Lease
from raytf.storage.storage import Storage
from raytf.testing import environment
from tests.support.runs import a_run, add_result, add_steps

#: What an endless header may take of the server's memory, and of the time of others; before, 245 MiB and 11 s.
MOST_MIB, MOST_SECONDS = 20, 2.0


@contextlib.contextmanager
def running(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address, from when it answers."""
    command = [sys.executable, "-m", "raytf", "ui", str(folder), "--port", "0"]
    env = environment(XDG_CACHE_HOME=str(folder.parent / "cache"))
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().rpartition(" ")[2].strip()
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(requests.ConnectionError):
                    requests.get(f"{url}api/runs", timeout=30)
                    break
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield process, url
        finally:
            process.kill()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = a_run().write(str(tmp_path / "runs" / "first"))
    add_steps(run, lambda step: 1 / step, 10)
    add_result(run)
    return tmp_path / "runs"


def endless_header(url: str, is_refused: threading.Event, answer: list[bytes]) -> Callable[[], None]:
    """Send a header without an end, and keep the answer."""

    def send() -> None:
        address = urllib.parse.urlsplit(url)
        try:
            with socket.create_connection((address.hostname, address.port), timeout=10) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ")
                with contextlib.suppress(OSError):
                    for _ in range(32):
                        stranger.sendall(b"y" * (1 << 20))
                answer.append(stranger.recv(4096))
        finally:
            is_refused.set()

    return send


def test_an_endless_header_is_refused_and_holds_up_nobody(folder):
    is_refused, answer, slowest = threading.Event(), list[bytes](), 0.0
    with running(folder) as (process, url):
        before = psutil.Process(process.pid).memory_info().rss
        thread = threading.Thread(target=endless_header(url, is_refused, answer), daemon=True)
        thread.start()
        while True:
            is_last, began = is_refused.is_set(), time.monotonic()
            assert requests.get(f"{url}api/runs", timeout=60).ok
            slowest = max(slowest, time.monotonic() - began)
            if is_last:
                break
        grown = psutil.Process(process.pid).memory_info().rss - before
        thread.join(60)
    assert answer[0].startswith(b"HTTP/1.1 431 ")
    assert slowest < MOST_SECONDS
    assert grown < MOST_MIB << 20


def test_names_that_no_run_has_are_not_found(folder):
    with running(folder) as (_, url):
        for path in ("run/first/trial-%00", "run/first/trial-001%00", "events/first/trial-..", "api/search/first%00"):
            assert requests.get(url + path, timeout=30).status_code == 404, path


def test_ctrl_c_while_pages_are_open_prints_one_line(folder):
    with (
        Lease(Storage(str(folder / "first"))),
        running(folder) as (process, url),
        requests.get(f"{url}events/first", stream=True, timeout=60) as page,
        requests.get(f"{url}events", stream=True, timeout=60) as runs,
    ):
        streams = page.iter_lines(), runs.iter_lines()  # kept, or their connections would be closed
        assert all(next(lines) for lines in streams)
        process.send_signal(2)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines() == ["raytf ui has stopped"]
