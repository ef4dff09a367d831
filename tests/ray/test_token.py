"""A cluster that wants a token, and a user who has it, has none, or has said nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from raytf.testing import ElasticCluster, Job, environment
from tests.ray.conftest import PATIENCE, ROOT, result_of

TOKEN = "0123456789abcdef" * 4
JOB = ["jobs/mnist.py", "--data", "digits", "--steps", "3", "--workers", "1", "--no-warm-workers"]


@pytest.fixture(scope="module")
def cluster():
    with ElasticCluster(head_cpus=2, token=TOKEN) as running:
        yield running


@pytest.mark.parametrize("mode", [None, "token"])
def test_the_user_s_token_opens_it(cluster: ElasticCluster, tmp_path: Path, mode: str | None):
    """A whole run, since a client may be let in and then lose its actors."""
    home = tmp_path / "home"
    (home / ".ray").mkdir(parents=True)
    (home / ".ray" / "auth_token").write_text(TOKEN)
    env = environment(RAY_ADDRESS=cluster.address, HOME=str(home))
    env.pop("RAY_AUTH_MODE", None)
    env |= {} if mode is None else {"RAY_AUTH_MODE": mode}
    with Job([sys.executable, *JOB, "--storage", str(tmp_path)], tmp_path / "log", env, folder=ROOT) as job:
        job.wait(PATIENCE)
    assert result_of(tmp_path / "mnist")["steps"] == 3


def test_who_has_none_is_told_at_once(cluster: ElasticCluster, tmp_path: Path):
    env = environment(RAY_ADDRESS=cluster.address, HOME=str(tmp_path / "nobody"))
    env.pop("RAY_AUTH_MODE", None)
    with Job([sys.executable, *JOB, "--storage", str(tmp_path)], tmp_path / "log", env, folder=ROOT) as job:
        assert job.ended() == 2
        output = job.output
    said = f"error: The Ray at {cluster.address} needs a token, and there is none here."
    assert output.splitlines()[-1].startswith(said)
    assert "export RAY_AUTH_MODE=token" in output
