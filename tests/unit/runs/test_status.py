"""The status file is JSON also for a run whose loss is none any more."""

from __future__ import annotations

import json
import math
from pathlib import Path

from raytf.runs.status import Status, StatusFile


def test_a_loss_that_is_not_finite_is_null(tmp_path: Path):
    file = StatusFile(str(tmp_path / "status.json"))
    history = [{"epoch": 0, "step": 5, "loss": math.inf}]
    file.show(Status(step=5, total=9, epoch=1, epochs=2, workers=1, metrics={"loss": math.nan}, history=history))
    text = (tmp_path / "status.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text
    status = json.loads(text)
    assert (status["metrics"], status["history"]) == ({"loss": None}, [{"epoch": 0, "step": 5, "loss": None}])
