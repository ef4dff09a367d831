"""A sample of tests/stress/torture/kills.py: nothing is lost or corrupt, and planted defects are found."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def torture(path, *flags):
    done = subprocess.run(
        [sys.executable, "-m", "tests.stress.torture.kills", "--json", str(path), *flags],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert path.exists(), done.stderr
    return done, json.loads(path.read_text())


@pytest.mark.parametrize(
    "flags",
    [["--kills", "18"], ["--kills", "12", "--damage", "--fail-share", "0.1"], ["--kills", "6", "--store", "s3"]],
    ids=["local", "local-damaged", "s3"],
)
def test_kills_lose_and_corrupt_nothing(tmp_path, flags):
    done, found = torture(tmp_path / "found.json", *flags, "--seed", "7")
    assert (done.returncode, found["violations"]) == (0, []), done.stdout
    total = found["rows"]["all"]
    assert total["kills"] == int(flags[1])
    assert total["memory"] + total["durable"] + total.get("new", 0) == total["kills"]
    assert found["totals"]["saves reported complete"] > 0
    assert found["totals"]["checkpoints compared"] > 0
    assert found["totals"]["hit as aimed"] >= total["kills"] / 2
    if "--damage" in flags:
        assert found["totals"]["damaged checkpoints named"] > 0


@pytest.mark.parametrize(("plant", "kind"), [("no-copy", "corrupt"), ("lying-store", "lost")])
def test_planted_defects_are_found(tmp_path, plant, kind):
    done, found = torture(tmp_path / "found.json", "--kills", "12", "--seed", "7", "--plant", plant)
    assert done.returncode == 1
    assert any(v.startswith(kind) for v in found["violations"])
