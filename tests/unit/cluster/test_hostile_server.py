"""`raytf submit` and a job server that is broken or hostile: one line, an end, and nothing that a terminal obeys."""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

import pytest
import requests

from raytf._ray.jobs import RequestLimits, TimedClient
from raytf.cluster.job_server import AwayError, JobServer, reach
from raytf.cluster.resubmission import ResubmissionLimits
from raytf.cluster.submission import Environment, Submission
from raytf.errors import ClusterError
from raytf.testing import environment

VERSION = b'{"version": "4", "ray_version": "2.60.0"}'
NESTED = b"[" * 100_000 + b"]" * 100_000
#: How a good server answers, by a regular expression of a request's line; the first one counts.
GOOD = {
    "GET /api/version": VERSION,
    "GET /api/v0/actors": json.dumps({"data": {"result": {"result": []}}}).encode(),
    "GET /api/jobs/ ": b"[]",
    "POST /api/jobs/ ": b'{"job_id": "x", "submission_id": "x"}',
}
#: Answers that are none, to any request.
BAD = {
    "a list": b"[]",
    "a list of lists": b"[[], [1]]",
    "a number": b"7",
    "a text": b'"x"',
    "null": b"null",
    "nothing": b"",
    "nested": NESTED,
    "nested objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "cut off": b'{"status": "RUN',
    "a list of texts": b'["a", "b"]',
    "not UTF-8": b'{"status": "\xff\xfe"}',
    "a long number": b'{"status": ' + b"9" * 100_000 + b"}",
    "types": b'{"status": {}, "message": [], "driver_exit_code": "x", "logs": {"a": 1}, "ray_version": 1, "data": []}',
    "objects": b'[{"status": [], "metadata": 7, "start_time": "x"}, {"metadata": {"raytf_origin": "me"}}]',
    "NaN": b'{"status": NaN, "driver_exit_code": Infinity, "ray_version": NaN}',
    "an exit code that is none": b'{"status": "FAILED", "driver_exit_code": 1e300}',
    "a page": b"<html>maintenance",
}


class _Handler(socketserver.StreamRequestHandler):
    """Answers one request as the test says, and hangs up."""

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            line = self.rfile.readline().decode("latin-1")
            length = 0
            while header := self.rfile.readline().strip():
                name, _, value = header.partition(b":")
                length = int(value) if name.lower() == b"content-length" else length
            self.rfile.read(length)
            answers: Mapping[str, bytes | Callable[[socket.socket], None]] = self.server.answers  # type: ignore[attr-defined]
            body = next((body for pattern, body in answers.items() if re.match(pattern, line)), b"")
            if callable(body):
                body(self.connection)
            else:
                self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))


@pytest.fixture
def serve() -> Iterator[Callable[[Mapping[str, object]], str]]:
    """serve(answers): the address of a server that gives these."""
    servers: list[socketserver.ThreadingTCPServer] = []

    def start(answers: Mapping[str, object]) -> str:
        server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Handler)
        server.daemon_threads, server.answers = True, answers  # type: ignore[attr-defined]
        servers.append(server)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        return f"http://127.0.0.1:{server.server_address[1]}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize("kind", BAD)
def test_an_answer_of_any_kind_is_a_head_that_is_away(serve, kind: str):
    """First to the version, then to all that follows it."""
    with pytest.raises(ClusterError, match="No job server of Ray answers at"):
        reach(serve({"GET": BAD[kind]}))
    answers = {"GET /api/version": VERSION, "": BAD[kind]}
    server = JobServer(serve(answers))
    for ask in (
        lambda: server.running("true", "me"),
        server.newest,
        lambda: server.submit("raytf-a", "true", {}, {}),
        lambda: server.inspect("raytf-a"),
        lambda: server.stop("raytf-a"),
        lambda: server.log("raytf-a"),
    ):
        with contextlib.suppress(AwayError, ClusterError):
            ask()
    outside = Environment(lambda text: None, lambda text: None, time.monotonic, lambda seconds: None, random.random)
    job = Submission(server, "true", "me", {}, ResubmissionLimits(0, 1e-9), outside)
    with contextlib.suppress(ClusterError):
        job.begin()
    job.name = "raytf-a"
    assert job.wait() == 1


@pytest.mark.parametrize(
    ("jobs", "newest"),
    [
        ([], None),
        ([("raytf-a-0", 1, {"raytf": "raytf-a-0"}), ("raytf-b-0", 2, {"raytf": "raytf-b-0"})], "raytf-b-0"),
        ([("raytf-b-0", 2, {"raytf": "raytf-b-0"}), ("raytf-a-0", 1, {"raytf": "raytf-a-0"})], "raytf-b-0"),
        ([("raytf-a-0", 1, {"raytf": "raytf-a-0"}), ("raysubmit_x", 2, {}), (None, 3, {"raytf": "b"})], "raytf-a-0"),
        ([("raysubmit_x", 2, None)], None),
    ],
)
def test_the_newest_job_is_the_last_that_raytf_submitted(serve, jobs: list[tuple], newest: str | None):
    rows = [
        {"submission_id": name, "start_time": start, "metadata": marks, "status": "RUNNING", "entrypoint": "true"}
        for name, start, marks in jobs
    ]
    server = JobServer(serve({"GET /api/version": VERSION, "GET /api/jobs/": json.dumps(rows).encode()}))
    assert server.newest() == (newest and (newest, "true"))


def drip(head: bytes) -> Callable[[socket.socket], None]:
    """Send the beginning of an answer, and then a byte now and then until the client hangs up."""

    def answer(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(b"x")
            time.sleep(0.05)

    return answer


def pour(connection: socket.socket) -> None:
    """Send an answer without an end as fast as it is taken."""
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n[")
    while True:
        connection.sendall(b"1," * (1 << 19))


@pytest.mark.parametrize("head", [b"HTTP/1.1 200 OK\r\nX: ", b"HTTP/1.1 200 OK\r\nContent-Length: 999999\r\n\r\n", b""])
def test_an_answer_that_drips_is_waited_for_in_vain_for_a_bounded_time(serve, head: bytes):
    limits = RequestLimits(5, 5, 5, 1 << 20)
    client = TimedClient(serve({"GET /api/version": VERSION, "GET": drip(head)}), lambda method, path: limits)
    limits = RequestLimits(5, 5, 0.5, 1 << 20)
    began = time.monotonic()
    with pytest.raises(requests.Timeout):
        client.get("/api/jobs/")
    assert time.monotonic() - began < 4


def test_an_answer_without_an_end_is_not_taken(serve):
    with pytest.raises(ClusterError, match="the answer has more than 32 MiB"):
        reach(serve({"GET": pour}))


def test_the_command_prints_no_escape_sequence_of_a_log_and_no_traceback(serve, tmp_path):
    evil = "a\x1b]0;title\x07b \x1b[31mred\x1b[0m \x1b[2J\x1b[1;1H\x9b31m\x08\x00\x1bcé\r\nend\r"
    job = {"status": "SUCCEEDED", "message": "\x1b[2J"}
    answers = {r"GET /api/jobs/\S+/logs ": json.dumps({"logs": evil}).encode(), **GOOD}
    answers |= {r"GET /api/jobs/raytf-\w+-\w+-0 ": json.dumps(job).encode()}
    command = [sys.executable, "-m", "raytf", "submit", serve(answers), "--working-dir", "", "--", "true"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "ab red 31mé\nend\n"
    assert [line.partition(":")[0] for line in done.stderr.splitlines()] == ["raytf submit"] * 2
