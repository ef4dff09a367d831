"""What the gate adds lies where the second command of .ci/run looks: elsewhere it would never be run."""

from __future__ import annotations

import re
from pathlib import Path

from tests.conftest import ROOT, WITH_RAY

COMMAND = re.compile(r"^step tests (tests/.*) --numprocesses=2 -m 'gate and not slow and not jobs'$", re.MULTILINE)


def test_what_is_marked_for_the_gate_lies_where_the_gate_looks():
    (named,) = COMMAND.findall((ROOT / ".ci" / "run").read_text())
    folders = [ROOT / folder for folder in named.split()]
    marked = [path for path in (ROOT / "tests").rglob("*.py") if re.search(r"\bmark\.gate\b", path.read_text())]
    assert marked
    assert [path for path in (*marked, *WITH_RAY) if not within(path, folders)] == []


def within(path: Path, folders: list[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
