"""A machine that computes wrongly: an audit names it, it is left out, and the run ends as if it had not been there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from raytf.runs import ledger
from raytf.storage.storage import Storage
from raytf.testing import ElasticCluster, Job
from tests.ray.conftest import ROOT, result_of

MISCOMPUTING = ROOT / "tests" / "ray" / "jobs" / "miscomputing.py"
STEPS, AFTER, EVERY = 120, 60, 10


@pytest.mark.parametrize(
    ("flags", "how"),
    [((), "always"), pytest.param(("--exact",), "now and then", marks=pytest.mark.slow)],
    ids=["always", "exact"],
)
def test_a_node_that_computes_wrongly_is_named_and_left_out(
    start: Callable[..., Job], tmp_path: Path, flags: tuple[str, ...], how: str
):
    mark = tmp_path / "wrong"
    flags += ("--steps", STEPS, "--global-batch-size", 24, "--audit-every", EVERY, "--checkpoint-every-steps", 20)
    flags += ("--storage", tmp_path, "--no-warm-workers", "--after", AFTER, "--how", how)
    with ElasticCluster(nodes=4) as cluster:
        run = start(MISCOMPUTING, *flags, "--workers", 3, "--run", "a", "--mark", mark, **cluster.env)
        output = run.wait(480)
    node = mark.read_text()
    assert re.search(r"step \d+, shard \d+: rank \d \(.*\) computes wrongly", output), output
    assert f"node {node[:8]} is left out: a worker on it computed wrongly" in output
    events = ledger.read(Storage(str(tmp_path / "a")))
    [audit] = [event for event in events if event["kind"] == "audit"]
    [fault] = [event for event in events if event["kind"] == "fault"]
    assert (fault["nodes"], fault["retry"]) == ([node], True)
    # Three workers: it is the owner of the shard, or the auditor, in two audits of three.
    assert AFTER < audit["of_step"] <= AFTER + 8 * EVERY
    # Exact mode takes nothing from a machine that was wrong; else the latest audit that agreed with it counts.
    assert ("the run begins again" in audit["text"]) == ("--exact" in flags)
    assert "--exact" in flags or int(re.search(r"goes back to step (\d+)", audit["text"])[1]) <= AFTER
    start(MISCOMPUTING, *flags, "--workers", 1, "--run", "b").wait()
    assert result_of(tmp_path / "a")["weights_sha256"] == result_of(tmp_path / "b")["weights_sha256"]
