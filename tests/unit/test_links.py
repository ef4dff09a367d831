"""Every relative link, anchor and picture of the pages in the root and in docs/ leads somewhere, and so does each path
of a page that code, configurations and messages name."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [*(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG")), *sorted(DOCS.rglob("*.md"))]
#: Texts that name pages.
NAMING = (".css", ".js", ".json", ".md", ".py", ".sh", ".toml", ".yaml", ".yml", "Dockerfile", "Makefile")


def prose(text: str) -> str:
    """A page without its code, where brackets mean something else."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^ {4,}(?![-*] |\d+\. ).*$", "", text, flags=re.MULTILINE)
    return re.sub(r"`[^`\n]*`", "`code`", text)


def anchors(text: str) -> set[str]:
    """The anchors that GitHub makes of a page's headings: a heading that comes again gets a number."""
    found: set[str] = set()
    for head in re.findall(r"^#+ +(.*?) *$", re.sub(r"^```.*?^```", "", text, flags=re.M | re.S), re.MULTILINE):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", head)
        name = base = re.sub(r"[^\w -]", "", plain).strip().lower().replace(" ", "-")
        count = 0
        while name in found:
            count += 1
            name = f"{base}-{count}"
        found.add(name)
    return found


def lost(page: Path, text: str) -> Iterator[str]:
    """Targets of links of a page that are not there."""
    for target in re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", prose(text)):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if file.exists() and (not anchor or anchor in anchors(text if file == page else file.read_text())):
            continue
        yield target


def tracked() -> list[Path]:
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=60)
    if done.returncode:
        pytest.skip("not a checkout of git")
    names = [name for name in done.stdout.split("\0") if name.endswith(NAMING)]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path):
    assert list(lost(page, page.read_text())) == []


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_the_map_has_every_page(page: Path):
    index = DOCS / "index.md"
    there = {(DOCS / target).resolve() for target in re.findall(r"\]\(([^)#\s]+)", index.read_text())}
    assert page == index or page in there


def test_the_site_has_every_page():
    def pages(nav: object) -> Iterator[str]:
        for part in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else []:
            yield from [part] if isinstance(part, str) else pages(part)

    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    assert sorted(pages(site["nav"])) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_pages_that_files_name_are_there():
    named = re.compile(r"(?<![\w./-])docs/[\w./-]*\w\.(?:md|svg)\b")
    gone = {
        (str(file.relative_to(ROOT)), path)
        for file in tracked()
        for path in named.findall(file.read_text())
        if not (ROOT / path).exists()
    }
    assert gone == set()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[a](README.md) [b](docs/index.md#raytf) [c](https://nowhere.invalid/x) [d](#here)\n\n## Here\n", []),
        ("[a](nowhere.md)", ["nowhere.md"]),
        ("![a](images/nothing.svg)", ["images/nothing.svg"]),
        ("[a](#there)\n\n## Here\n", ["#there"]),
        ("[a](docs/index.md#no-such-heading)", ["docs/index.md#no-such-heading"]),
        ("[a](#twice-1) [b](#twice-2)\n\n## Twice\n\n## Twice\n", ["#twice-2"]),
        ("`[a](nowhere.md)`\n\n    [b](nowhere.md)\n\n```\n[c](nowhere.md)\n```\n", []),
        ("- item\n    - [b](nowhere.md)\n", ["nowhere.md"]),
    ],
)
def test_the_check_finds_what_leads_nowhere(text: str, expected: list[str]):
    assert list(lost(ROOT / "README.md", text)) == expected


def test_what_the_makefile_runs_is_there():
    text = (ROOT / "Makefile").read_text()
    scripts = re.findall(r"python (\w[\w/]*\.py)", text)
    scripts += [f"{name.replace('.', '/')}.py" for name in re.findall(r"python -m ((?:benchmarks|tests)[\w.]+)", text)]
    named = [*scripts, *re.findall(r"\btests/[\w/.]+", text), *re.findall(r"--results (\S+)", text)]
    assert len(named) >= 5
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_checks_are_the_same_everywhere():
    """The Makefile, the gate and pre-commit run the same checks, and the first page for contributors names them."""
    checks = ["ruff check", "ruff format", "mypy", "lint-imports", "codespell"]
    files = ["Makefile", ".ci/run", ".pre-commit-config.yaml", "CONTRIBUTING.md"]
    assert [(name, check) for name in files for check in checks if check not in (ROOT / name).read_text()] == []
