"""The tutorial, typed as it stands; `python -m tests.stress.as_typed` does the same in a fresh environment."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from tests.stress import as_typed

pytestmark = pytest.mark.gate


@pytest.mark.timeout(900)
def test_the_tutorial(tmp_path: Path):
    texts = as_typed.blocks((as_typed.ROOT / "docs/getting-started/tutorial.md").read_text(), installs=False)
    env = as_typed.of_shell(tmp_path, Path(sys.executable).parent) | {"PYTHONPATH": str(as_typed.ROOT)}
    done = as_typed.type_all(texts, as_typed.ROOT, env)
    assert (done[-1].code, len(done)) == (0, len(texts)), done[-1].output[-3000:]
    said = {each.text.strip(): each.output for each in done}
    assert "finished: 1410 steps" in said["raytf run --workers 2 train.py"]
    assert re.search(
        r"^stopped/1 +finished +5640 ", said["raytf run --workers 2 --epochs 20 --run stopped train.py"], re.M
    )
    one, three = (json.loads((tmp_path / f"raytf-runs/{name}/1/result.json").read_text()) for name in ("one", "three"))
    assert one["weights_sha256"] == three["weights_sha256"]
    assert "cluster.yaml: nothing found" in done[-1].output
