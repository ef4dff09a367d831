"""The tutorial, typed as it stands; `python -m tests.stress.as_typed` does the same in a fresh environment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.ray.conftest import result_of
from tests.stress import as_typed

pytestmark = pytest.mark.gate


@pytest.mark.slow  # `python -m tests.stress.as_typed` types it, too, and CI has little time on a slow machine
@pytest.mark.timeout(900)
def test_the_tutorial(tmp_path: Path):
    texts = as_typed.typed_of("docs/getting-started/tutorial.md", here=True)
    env = as_typed.of_shell(tmp_path, Path(sys.executable).parent) | {"PYTHONPATH": str(as_typed.ROOT)}
    code, done = as_typed.type_all(texts, as_typed.ROOT, env)
    assert (code, len(done)) == (0, len(texts)), done[-1].output[-3000:]
    said = {each.text.strip(): each.output for each in done}
    assert "finished: 1410 steps" in said["raytf run --workers 2 train.py"]
    one, three, stopped = (result_of(tmp_path / "raytf-runs" / name / "1") for name in ("one", "three", "stopped"))
    assert one["weights_sha256"] == three["weights_sha256"]
    assert stopped["steps"] == 11280
    last = "raytf run --workers 2 --epochs 40 --run stopped train.py"
    killed = "".join(said[text] for text in said if text.startswith((f"{last} &", "until ", "kill ")))
    assert killed
    assert "finished:" not in killed
    assert "restored step" in said[last]
    assert "cluster.yaml: nothing found" in done[-1].output
