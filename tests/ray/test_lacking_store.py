"""Stores that lack conditional writes: a run is trained, killed and resumed there, and has one owner."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from raytf.testing import StorageProxy
from tests.ray.conftest import MNIST_JOB, Bucket


@pytest.mark.slow  # tests/unit: runs/test_lease.py and storage/test_claims.py have races on these
@pytest.mark.parametrize(
    "lack",
    [
        # OpenStack Swift 2.30: neither condition, no uploads in chunks, and here no deletion of many at once either.
        {"create": "refused", "swap": "refused", "chunks": False, "batches": False},
        pytest.param({"create": "racy", "swap": "refused"}, id="Swift 2.38"),
        pytest.param({"create": "refused", "swap": "refused"}, id="neither"),
        pytest.param({"create": "overlooked", "swap": "overlooked"}, id="overlooks"),
    ],
)
def test_kill_and_two_commands_at_once(start, tmp_path: Path, bucket: Bucket, lack: dict):
    with StorageProxy(bucket.endpoint) as proxy:
        proxy.lack(**lack)
        storage = bucket.uri("runs").replace(bucket.endpoint, proxy.endpoint)
        flags = ("--data", "digits", "--workers", 1, "--checkpoint-every-steps", 12, "--steps-per-call", 4)
        flags = (*flags, "--no-warm-workers", "--storage", storage, "--run", "a")
        run = start(MNIST_JOB, *flags, **bucket.env)
        run.until(lambda: any(key.endswith("MANIFEST.json") for key in bucket.keys("runs/a/checkpoints/")))
        run.until(lambda: json.loads(bucket.get("runs/a/lease.json"))["beat"] > 0)
        run.kill()

        both = [start(MNIST_JOB, *flags, **bucket.env) for _ in range(2)]
        codes = [job.ended() for job in both]

        assert sorted(codes) == [0, 75], "\n".join(job.output for job in both)
        winner, loser = both[codes.index(0)], both[codes.index(75)]
        assert "restored step" in winner.output
        assert "cannot be renewed" not in winner.output
        assert "is in use by process" in loser.output
        result = json.loads(bucket.get("runs/a/result.json"))
        assert (result["restarts"], result["metrics"]["test_accuracy"] >= 0.95) == (1, True)
        left = [key for key in bucket.keys("runs/") if "probe" in key or "claims" in key or "lease" in key]
        assert left == []
