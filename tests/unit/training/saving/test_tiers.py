"""Who may write checkpoints: the newest workers of the driver that owns the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from raytf.driver.monitor.actor import Monitor
from raytf.errors import RunInUseError
from raytf.runs.lease import LEASE_FILE
from raytf.storage.storage import Storage
from raytf.training.saving.checkpointer import check_current


class Answering:
    """A MonitorClient whose monitor lives in this process."""

    def __init__(self) -> None:
        self.monitor = Monitor([])

    def is_over(self, attempt: str, seconds: float) -> bool:
        return self.monitor.is_over(attempt)


def test_only_the_newest_workers_of_the_owner_write(tmp_path: Path):
    run, client = Storage(str(tmp_path)), Answering()
    answers: Any = client
    run.put(LEASE_FILE, json.dumps({"id": "me", "host": "here", "boot": "b", "pid": 1, "started": "1"}).encode())
    client.monitor.begin("a")
    check_current(run, "me", "a", answers)
    with pytest.raises(RunInUseError, match="belongs to process 1 on here"):
        check_current(run, "another", "a", answers)
    client.monitor.begin("b")  # rank 0 of the first attempt was frozen, and thaws
    check_current(run, "me", "b", answers)
    with pytest.raises(RunInUseError, match=r"other workers continue run .* writes no more"):
        check_current(run, "me", "a", answers)
