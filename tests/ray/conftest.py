"""Runs jobs as a user does: a command, its output, its exit code. Everything started is stopped again."""

from __future__ import annotations

import json
import re
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raytf.testing import ElasticCluster, Job, environment
from raytf.testing.job import PATIENCE_SECONDS

ROOT = Path(__file__).parents[2]
MNIST_JOB = ROOT / "jobs" / "mnist.py"
EVERYTHING = Path(__file__).parent / "jobs" / "everything.py"
PATIENCE = PATIENCE_SECONDS


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """start(job, *flags, **env): a job, started; stopped at the end of the test."""
    runs: list[Job] = []

    def begin(job: Path, *flags: object, **env: str) -> Job:
        command = [sys.executable, str(job), *map(str, flags)]
        runs.append(Job(command, tmp_path / f"run-{len(runs)}.log", environment(**env)))
        return runs[-1]

    yield begin
    for run in runs:
        run.close()


@pytest.fixture(scope="package")  # not of the session: later tests would have a Ray beside them that nobody uses
def cluster() -> Iterator[dict[str, str]]:
    """A running Ray with a job server, for tests that need no Ray of their own: the environment to reach it.

    Keys: RAY_ADDRESS, and `dashboard`, the job server's address.
    """
    with ElasticCluster(head_cpus=4, dashboard=True) as running:
        assert running.dashboard_url is not None
        yield {"RAY_ADDRESS": running.address, "dashboard": running.dashboard_url}


@pytest.fixture
def start_there(start: Callable[..., Job], cluster: dict[str, str]) -> Callable[..., Job]:
    """As `start`, on the running Ray: for jobs that nobody kills, so that no warm process would ever be used."""

    def begin(job: Path, *flags: object, **env: str) -> Job:
        trains = re.search(r"\braytf\.Flags\b|\bimport .*\bFlags\b", job.read_text()) is not None
        cold = ("--no-warm-workers",) if trains else ()
        return start(job, *flags, *cold, RAY_ADDRESS=cluster["RAY_ADDRESS"], **env)

    return begin


class Bucket:
    """A bucket of a test's own on an S3 server."""

    def __init__(self, endpoint: str):
        import boto3

        self.name = f"raytf-{uuid.uuid4().hex[:12]}"
        self.endpoint = endpoint
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
        return f"s3://{self.name}/{prefix}?endpoint_override={self.endpoint}&scheme=http&region=us-east-1"

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
