"""`raytf submit` before it has a cluster: what it understands and what it refuses. tests/ray has it with one."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from raytf.cluster import job_server
from raytf.cluster.job_server import AwayError, Follower, JobServer
from raytf.cluster.resubmission import JobSighting, ResubmissionLimits
from raytf.cluster.submission import Environment, Submission, address_of, environment_of, origin_of, run_of
from raytf.commands import submit
from raytf.commands.main import with_rest
from raytf.errors import ClusterError, ConfigError
from raytf.runs.start_command import submission
from raytf.testing import environment
from raytf.testing.processes import free_port, wait_until

RAYTF = [sys.executable, "-c", "from raytf.commands.main import main; main()"]


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("http://host:8265", "http://host:8265"),
        ("http://host:8265/", "http://host:8265"),
        ("host:8265", "http://host:8265"),
        ("https://ray.example.com", "https://ray.example.com"),
        ("http://[::1]:8265", "http://[::1]:8265"),
    ],
)
def test_addresses(text: str, address: str):
    assert address_of(text) == address


@pytest.mark.parametrize(
    "text", ["", "host", "http://", "http://host", "ray://host:10001", "http://h:x", "auto", "h:1/a"]
)
def test_what_is_no_address(text: str):
    with pytest.raises(ConfigError, match="such as http://HOST:8265"):
        address_of(text)


def test_variables():
    assert environment_of(["A=1", "B_2=x=y", "C="]) == {"A": "1", "B_2": "x=y", "C": ""}
    for wrong in ("A", "=1", "1A=2", "A-B=1"):
        with pytest.raises(ConfigError, match="expected NAME=VALUE"):
            environment_of([wrong])


@pytest.mark.parametrize(
    ("command", "run"),
    [
        ("python a.py", "a"),
        ("raytf run --workers 2 'my net.py' --run b", "b"),
        ("raytf run 'my net.py'", "my-net"),
        ("python -m train", "run"),
        ("python a.py --run b --steps 3", "b"),
        ("python a.py --run=c", "c"),
        ("python a.py --run 'x y/z'", "x_y_z"),
        ("python a.py --run", "a"),
        ("echo 'open", "run"),
    ],
)
def test_the_run_of_a_command(command: str, run: str):
    assert run_of(command) == run


def test_what_follows_the_dashes_is_the_command_alone():
    assert with_rest(submit.main, ["http://h:1", "--no-wait", "--", "python", "a b.py", "--env", "$X", "--"]) == [
        "http://h:1",
        "--no-wait",
        "--command=python 'a b.py' --env '$X' --",
    ]
    assert with_rest(submit.main, ["--help"]) == ["--help"]


def test_a_folder_is_packed_without_what_is_ignored(tmp_path: Path):
    project, scratch = tmp_path / "project", tmp_path / "scratch"
    for name in ("jobs/a.py", ".git/HEAD", "data/large.bin", "notes.txt"):
        (project / name).parent.mkdir(parents=True, exist_ok=True)
        (project / name).write_text(name)
    (project / ".gitignore").write_text("data/\n")
    scratch.mkdir()
    with zipfile.ZipFile(submit.pack_working_dir(str(project), scratch)) as packed:
        assert {name for name in packed.namelist() if not name.endswith("/")} == {
            ".gitignore",
            "jobs/a.py",
            "notes.txt",
        }


def test_a_package_that_the_job_server_would_refuse_is_not_sent(tmp_path: Path):
    project = tmp_path / "project"
    project.mkdir()
    (project / "noise.bin").write_bytes(os.urandom(submit.MOST_BYTES + (1 << 20)))
    with pytest.raises(ConfigError, match=r"package has 101 MiB, but Ray's job server accepts 100 MiB\. .*\.rayignore"):
        submit.pack_working_dir(str(project), tmp_path)


def test_a_folder_far_too_large_is_not_even_packed(tmp_path: Path):
    project = tmp_path / "project"
    project.mkdir()
    with (project / "hole.bin").open("wb") as file:
        file.truncate(600 << 20)
    with pytest.raises(ConfigError, match=r"has more than 512 MiB: hole\.bin \(600 MiB\)"):
        submit.pack_working_dir(str(project), tmp_path)
    assert not (tmp_path / "working_dir.zip").exists()


def test_a_log_is_shown_once_whatever_becomes_of_the_connection():
    parts = [f"line {i}\n" for i in range(30)]
    rounds, shown = [0], []

    async def tail() -> AsyncIterator[str]:
        rounds[0] += 1
        for part in parts[: 4 * rounds[0]]:
            yield part
        raise RuntimeError("closed")

    log = Follower(tail, shown.append)
    wait_until(lambda: rounds[0] >= 3, "it has read again", 60)
    log.renew()
    wait_until(lambda: len(shown) >= 12, "it has shown more", 60)
    log.finish("".join(parts))
    assert "".join(shown) == "".join(parts)
    log.finish("".join(parts))
    assert "".join(shown) == "".join(parts)


class Cluster:
    """A job server in memory, whose jobs end as the test says."""

    address = "http://127.0.0.1:8265"

    def __init__(self) -> None:
        self.jobs: dict[str, JobSighting] = {}
        self.told: dict[str, tuple[str, str]] = {}
        self.now = 0.0
        self.said: list[str] = []

    def submit(self, name, command, runtime_env, metadata):
        self.jobs[name], self.told[name] = JobSighting("RUNNING"), (command, metadata["raytf_origin"])

    def inspect(self, name):
        return self.jobs[name]

    def running(self, command, origin):
        found = [n for n, told in self.told.items() if told == (command, origin) and self.jobs[n].status == "RUNNING"]
        return found[-1] if found else None

    def log(self, name):
        return ""

    def stop(self, name):
        self.jobs[name] = JobSighting("STOPPED")

    def follow(self, name, show):
        return Follower(_nothing, show)

    def submission(self, origin: str = "me", limits: ResubmissionLimits | None = None, seconds=None) -> Submission:
        def sleep(wanted: float) -> None:
            self.now += wanted
            if seconds is not None:
                seconds()

        outside = Environment(self.said.append, lambda text: None, lambda: self.now, sleep, lambda: 1.0)
        return Submission(self, "python train.py", origin, {}, limits or ResubmissionLimits(), outside)


async def _nothing() -> AsyncIterator[str]:
    return
    yield


def test_a_command_is_one_s_own_by_user_folder_and_variables():
    mine = origin_of("me@laptop", "/project", {"LR": "1"})
    assert mine == origin_of("me@laptop", "/project", {"LR": "1"})
    others = [
        ("you@laptop", "/project", {"LR": "1"}),
        ("me@laptop", "/copy", {"LR": "1"}),
        ("me@laptop", "/project", {}),
    ]
    assert mine not in {origin_of(*other) for other in others}
    cluster = Cluster()
    for origin in ("a", "b", "a"):
        cluster.submission(origin).begin()
    assert sorted(origin for _, origin in cluster.told.values()) == ["a", "b"]
    assert cluster.said[-1].endswith("already runs this command")


def test_of_two_that_follow_a_job_that_died_one_submits_it_again():
    cluster = Cluster()
    first, second = cluster.submission(), cluster.submission()
    first.begin()
    second.begin()
    cluster.jobs[first.name] = JobSighting("FAILED", -9)
    again = []

    def other_is_faster() -> None:
        if not again:
            again.append("another")
            cluster.submit("another", "python train.py", {}, {"raytf_origin": "me"})
        else:
            cluster.jobs["another"] = JobSighting("SUCCEEDED", 0)

    follower = cluster.submission(seconds=other_is_faster)
    follower.name = first.name
    assert follower.wait() == 0
    assert follower.name == "another"
    assert len(cluster.jobs) == 2


def test_the_jobs_of_one_command_are_one_submission_whoever_follows_them():
    def of(name: str) -> str:
        return submission({"RAY_JOB_CONFIG_JSON_ENV_VAR": json.dumps({"metadata": {"job_submission_id": name}})})

    cluster = Cluster()
    first, second = cluster.submission(), cluster.submission()
    first.begin()
    second.begin()  # follows the same job, as after Ctrl-C
    cluster.jobs[first.name] = JobSighting("FAILED", -9)
    names = [first.name]

    def ends() -> None:
        if second.name != names[-1]:
            names.append(second.name)
            cluster.jobs[second.name] = JobSighting("FAILED", -9) if len(names) < 3 else JobSighting("SUCCEEDED", 0)

    second.outside = Environment(cluster.said.append, print, lambda: cluster.now, _sleeping(cluster, ends), lambda: 1.0)
    assert second.wait() == 0
    assert len(names) == len(set(names)) == 3
    assert {of(name) for name in names} == {first.name.removesuffix("-0")}
    assert of("raysubmit_ab12-3") == "raysubmit_ab12-3"
    assert submission({}) == submission({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}) == ""


def test_a_pause_is_no_silence_of_the_head():
    cluster = Cluster()
    job = cluster.submission(limits=ResubmissionLimits(resubmits=3, silence=1.0))
    job.begin()

    def dies() -> None:
        cluster.jobs[job.name] = JobSighting("FAILED", -9)

    dies()
    job.outside = Environment(cluster.said.append, print, lambda: cluster.now, _sleeping(cluster, dies), lambda: 1.0)
    assert job.wait() == 1
    assert "3 resubmissions in a row" in cluster.said[-1]
    assert cluster.now > 2 + 4 + 8


@pytest.mark.parametrize(("failures", "is_taken"), [(0, True), (3, True), (1000, False)])
def test_a_cluster_without_an_agent_is_waited_for(failures: int, is_taken: bool):
    cluster, tries = Cluster(), []
    take = cluster.submit

    def submit(*args):
        tries.append(args)
        if len(tries) <= failures:
            raise AwayError("Request failed with status code 500: No available agent to submit job, please try again.")
        take(*args)

    cluster.submit = submit
    job = cluster.submission()
    if is_taken:
        job.begin()
        assert (len(tries), cluster.now) == (failures + 1, 2.0 * failures)
        assert sum("takes no jobs yet" in line for line in cluster.said) == bool(failures)
    else:
        with pytest.raises(ClusterError, match="No available agent"):
            job.begin()
        assert cluster.now == 122.0


def test_another_answer_of_a_new_cluster_is_not_waited_for():
    cluster = Cluster()

    def submit(*args):
        raise AwayError("Request failed with status code 500: disk full")

    cluster.submit = submit
    with pytest.raises(ClusterError, match="disk full"):
        cluster.submission().begin()
    assert cluster.now == 0.0


@pytest.mark.parametrize(
    ("text", "mode", "token", "said"),
    [
        ("Authentication required: x", "token", "t", "needs a token"),
        ("Authentication failed: x", "token", "t", "does not accept this token"),
        ("Authentication failed: x", "token", "", "needs a token"),
        ("Authentication failed: x", "", "t", "needs a token"),
    ],
)
def test_a_token_that_was_not_sent_is_not_blamed(monkeypatch, tmp_path, text, mode, token, said):
    for name, value in (("MODE", mode), ("TOKEN", token), ("TOKEN_PATH", str(tmp_path / "none"))):
        monkeypatch.setenv(f"RAY_AUTH_{name}", value)
    assert f"http://h:1 {said}." in job_server._authentication("http://h:1", text)


@pytest.mark.parametrize("command", ["true", "python a.py", "'/my folder/run'", "a; b", "echo 'open", "'/a b' c"])
def test_a_command_that_a_shell_can_run_is_taken(command):
    assert submit.mistake(submit.Submit(("http://h:1",), command)) == ""


def _sleeping(cluster: Cluster, then) -> Callable[[float], None]:
    def sleep(seconds: float) -> None:
        cluster.now += seconds
        then()

    return sleep


def refused(*flags: str, **env: str) -> str:
    done = subprocess.run(
        [*RAYTF, "submit", *flags], capture_output=True, text=True, timeout=120, env=environment(**env)
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stdout == ""
    return done.stderr


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], "No address given. Expected: raytf submit http://HOST:8265 -- "),
        (["http://127.0.0.1:8265"], "No command given. Expected: "),
        (["http://127.0.0.1:8265", "--"], "No command given. Expected: "),
        (["http://127.0.0.1:8265", "python", "a.py"], "No command given. Expected: "),
        (
            ["http://h:1", "http://h:2", "--", "true"],
            "2 addresses given (http://h:1, http://h:2); a job runs at one",
        ),
        (["http://h:1", "--", "a; b"], "'a; b' is in quotes, so that the shell looks for a program of that name; pass"),
        (["http://h:1", "--", "python a.py"], "pass it by --command. Expected: raytf submit"),
        (["ray://127.0.0.1:10001", "--", "true"], "not a job server's address"),
        (["http://127.0.0.1:8265", "--env", "A", "--", "true"], "--env A: expected NAME=VALUE"),
        (["http://127.0.0.1:8265", "--max-resubmits", "-1", "--", "true"], "--max-resubmits -1: expected"),
        (["http://127.0.0.1:8265", "--head-seconds", "nan", "--", "true"], "--head-seconds nan: expected"),
    ],
)
def test_a_refusal_is_one_line(flags: list[str], words: str):
    assert words in refused(*flags)


def test_nobody_answers():
    address = f"http://127.0.0.1:{free_port()}"
    # Ray's own client would take this address instead.
    line = refused(address, "--", "true", RAY_ADDRESS="http://127.0.0.1:9")
    assert f"No job server of Ray answers at {address} (no connection)" in line


@pytest.fixture
def web_server() -> Iterator[str]:
    """The address of an HTTP server that is none of Ray's."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Silent)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


def test_somebody_else_answers(web_server: str):
    assert f"No job server of Ray answers at {web_server}" in refused(web_server, "--", "true")


class _Page(_Silent):
    """A page for people, with status 200, where Ray's version would be the only JSON."""

    def do_GET(self) -> None:
        body = b'{"version": "4", "ray_version": "2.60.0"}' if self.path == "/api/version" else b"<html>maintenance"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def test_a_page_of_a_proxy_is_no_answer_of_the_head():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Page)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        jobs = JobServer(f"http://127.0.0.1:{server.server_port}")
        for ask in (lambda: jobs.inspect("a"), lambda: jobs.running("true", "me"), lambda: jobs.log("a")):
            with pytest.raises(AwayError, match="not the answer of a job server: <html>"):
                ask()
    finally:
        server.shutdown()
        server.server_close()
