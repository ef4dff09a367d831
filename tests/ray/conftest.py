"""Runs jobs as a user does: a command, its output, its exit code. Everything started is stopped again."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
MNIST_JOB = ROOT / "jobs" / "mnist.py"
EVERYTHING = Path(__file__).parent / "jobs" / "everything.py"
#: Generous: two cores, perhaps loaded; a run of a few steps takes 15 to 30 s when they are not.
PATIENCE = 240.0


class Run:
    """A job that was started."""

    def __init__(self, command: list[str], env: dict[str, str], log: Path):
        self.log = log
        self._out = log.open("w")
        self.process = subprocess.Popen(
            command,
            env=env,
            stdout=self._out,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            cwd=log.parent,
        )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def wait(self, seconds: float = PATIENCE) -> str:
        """Wait for the end; the output. Fails the test when the job fails."""
        code = self.ended(seconds)
        assert code == 0, f"exit code {code}:\n{self.output}"
        return self.output

    def ended(self, seconds: float = PATIENCE) -> int:
        """Wait for the end; the exit code."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"not finished after {seconds:.0f} s:\n{self.output}")

    def until(self, condition: Callable[[], object], seconds: float = PATIENCE) -> None:
        """Wait until something holds while the job runs."""
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the job ended too soon:\n{self.output}"
            assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain:\n{self.output}"
            time.sleep(0.05)

    def processes(self, title: str = "") -> list[psutil.Process]:
        """The job's processes, or those whose command line holds a text such as `RayTrainWorker`."""
        try:
            family = psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []
        found = []
        for process in family:
            try:
                if title in " ".join(process.cmdline()):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def kill(self) -> None:
        """SIGKILL of the driver and of everything that it started."""
        family = self.processes()
        self.process.kill()
        for process in family:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(30)
        psutil.wait_procs(family, timeout=30)

    def close(self) -> None:
        if self.process.poll() is None:
            self.kill()
        self._out.close()


def environment(**extra: str) -> dict[str, str]:
    """The environment of a plain user: no trace of the test's own cluster or storage."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RAY_", "AWS_", "TF_"))}
    return {**env, "RAY_USAGE_STATS_ENABLED": "0", **extra}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """start(job, *flags, **env): a job, started; stopped at the end of the test."""
    runs: list[Run] = []

    def begin(job: Path, *flags: object, **env: str) -> Run:
        command = [sys.executable, str(job), *map(str, flags)]
        runs.append(Run(command, environment(**env), tmp_path / f"run-{len(runs)}.log"))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A running Ray with a job server, for tests that need no Ray of their own: the environment to reach it.

    Keys: RAY_ADDRESS, and `dashboard`, the job server's address.
    """
    port, dashboard = _free_port(), _free_port()
    # Ray's sockets have paths of at most 107 characters; pytest's folders may be longer.
    folder = Path(f"/tmp/raytf-{os.getpid()}")
    # `python` of a submitted job is that of the cluster's environment.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = environment(RAY_AUTH_MODE="disabled", PATH=path)
    ray = [sys.executable, "-m", "ray.scripts.scripts"]
    log_path = tmp_path_factory.mktemp("cluster") / "ray-start.log"
    log = log_path.open("w")
    head = subprocess.Popen(
        [
            *ray,
            "start",
            "--head",
            "--block",
            f"--port={port}",
            f"--dashboard-port={dashboard}",
            "--num-cpus=4",
            f"--temp-dir={folder}",
            "--include-dashboard=true",
            f"--ray-client-server-port={_free_port()}",
        ],
        env=env,
        stdout=log,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        address = f"127.0.0.1:{port}"
        deadline = time.monotonic() + PATIENCE
        while _status(f"http://127.0.0.1:{dashboard}/api/version") != 200:
            assert head.poll() is None, f"ray start failed:\n{log_path.read_text()}"
            assert time.monotonic() < deadline, "ray start did not come up"
            time.sleep(0.2)
        yield {"RAY_ADDRESS": address, "dashboard": f"http://127.0.0.1:{dashboard}"}
    finally:
        family = psutil.Process(head.pid).children(recursive=True) if head.poll() is None else []
        head.kill()
        for process in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        head.wait(30)
        psutil.wait_procs(family, timeout=30)
        log.close()
        subprocess.run(["rm", "-rf", str(folder)], check=False)


class Bucket:
    """A bucket of a test's own on an S3 server."""

    def __init__(self, endpoint: str):
        import boto3

        self.name = f"raytf-{uuid.uuid4().hex[:12]}"
        self._endpoint = endpoint
        self._client = boto3.client(
            "s3",
            endpoint_url=f"http://{endpoint}",
            region_name="us-east-1",
            aws_access_key_id="test",
            aws_secret_access_key="a-secret-of-the-test",
        )
        self._client.create_bucket(Bucket=self.name)
        #: What a job needs to reach it; the endpoint is in the URI.
        self.env = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "a-secret-of-the-test"}

    def uri(self, prefix: str) -> str:
        return f"s3://{self.name}/{prefix}?endpoint_override={self._endpoint}&scheme=http&region=us-east-1"

    def keys(self, prefix: str) -> list[str]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return [item["Key"] for page in pages for item in page.get("Contents", [])]

    def get(self, key: str) -> bytes:
        return self._client.get_object(Bucket=self.name, Key=key)["Body"].read()

    def put(self, key: str, data: bytes) -> None:
        self._client.put_object(Bucket=self.name, Key=key, Body=data)


@pytest.fixture
def bucket(s3_endpoint: str) -> Bucket:
    return Bucket(s3_endpoint)


def result_of(folder: Path) -> dict:
    """A run's result.json."""
    return json.loads((folder / "result.json").read_text())


def manifests(folder: Path) -> list[int]:
    """Steps of the complete checkpoints of a run in a folder."""
    return sorted(int(p.parent.name.split("-")[0]) for p in folder.glob("checkpoints/*/MANIFEST.json"))


def _free_port() -> int:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _status(url: str) -> int:
    import urllib.error
    import urllib.request

    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return answer.status
    except (urllib.error.URLError, OSError):
        return 0
