"""Each file of jobs/ is a page to copy: it says what it shows, what to expect, and answers --help at once."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
JOBS = sorted((ROOT / "jobs").glob("*.py"))
HELP = """
import runpy, sys
sys.argv = [sys.argv[1], "--help"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as done:
    assert not done.code, done.code
print(*sorted({"ray", "tensorflow", "keras"} & set(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_job_says_how_it_is_run_and_what_to_expect(job: Path):
    source = job.read_text()
    text = ast.get_docstring(ast.parse(source)) or ""
    assert f"python jobs/{job.name}" in text
    assert "Expect " in text
    assert len(source.splitlines()) <= 150, "a job is a page"
    listed = (ROOT / "docs" / "getting-started" / "jobs.md").read_text()
    assert f"jobs/{job.name}" in listed, "docs/getting-started/jobs.md does not list it"


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_a_job_stands_alone(job: Path):
    """Modules beside a job are not there on a cluster's workers."""
    tree = ast.parse(job.read_text())
    names = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    names |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    neighbours = {"jobs", *(other.stem for other in JOBS)}
    assert not {name.partition(".")[0] for name in names} & neighbours


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.name)
def test_help_of_a_job_is_quick_and_complete(job: Path):
    done = subprocess.run([sys.executable, "-c", HELP, str(job)], capture_output=True, text=True, timeout=120, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert done.stderr.split() == [], "it loads what only workers need"
    assert "--workers N|MIN:MAX" in done.stdout
