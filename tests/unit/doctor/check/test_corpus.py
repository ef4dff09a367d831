"""`raytf check` on a corpus: mistakes that users made in public, each found, and nothing else said."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from raytf.doctor.check import job_fit, offline
from raytf.doctor.finding import Severity
from raytf.doctor.local_environment import Surroundings

ROOT = Path(__file__).parents[4]
CORPUS = sorted((ROOT / "tests/data/broken_clusters").glob("*.yaml"))


def header(text: str, key: str) -> str | None:
    """The value of a comment `# key: value` in a file."""
    found = re.search(rf"^# {key}: (.*)$", text, re.MULTILINE)
    return found[1] if found else None


@pytest.fixture
def here(tmp_path: Path) -> Surroundings:
    return Surroundings("3.11.7", "2.60.0", ROOT, {"HOME": str(tmp_path)})


def test_it_has_sixty_mistakes_of_users():
    sources = [header(file.read_text(), "source") for file in CORPUS]
    assert all(sources)
    assert sum(source.startswith(("https://github.com/", "FACTS.md")) for source in sources if source) >= 60


@pytest.mark.parametrize("file", CORPUS, ids=lambda file: file.stem)
def test_a_mistake_is_found_once_and_nothing_else(file: Path, here: Surroundings):
    text = file.read_text()
    command = header(text, "job")
    report = offline.check(text, here, job_fit.parse(command) if command else None)
    wanted = sorted((header(text, "expect") or "").split(", "))
    said = [f"{f.line}: {f.code}: {f.what}" for f in report.findings]
    assert sorted({f.code for f in report.findings if f.severity is not Severity.FILL_IN}) == wanted, said
    for finding in report.findings:
        assert finding.line is not None, finding
        assert all((finding.what, finding.why, finding.fix)), finding
