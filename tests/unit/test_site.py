"""The site of docs/ builds, strictly and without a network, and its pages are of a size that people read."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import raytf
from raytf.config.keywords import FitSettings
from raytf.config.setting import Setting
from raytf.config.train_config import every_setting

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]
#: Words of a page that is not evidence or reference, at most.
WORDS = 2500
#: What may be as long as it is.
LONG = ("evidence", "reference")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("material")
    folder = tmp_path_factory.mktemp("site")
    # No proxy answers there: whoever asks the network fails.
    nowhere = dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=ROOT,
        env={**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_it_builds_strictly_with_every_page(site: Path):
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix("")
        made = site / (name.parent if name.name == "index" else name) / "index.html"
        assert made.is_file()


def test_a_reader_needs_no_network(site: Path):
    for page in site.rglob("*.html"):
        text = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"(https?:[^\"]+)", text)
        loaded += re.findall(r"<link[^>]* rel=\"(?:stylesheet|preload|icon)\"[^>]* href=\"(https?:[^\"]+)", text)
        assert loaded == []


def test_the_public_names_are_explained(site: Path):
    text = (site / "reference" / "api" / "index.html").read_text()
    missing = [name for name in raytf.__all__ if f"{name}</" not in text and f'"raytf.{name}' not in text]
    # Names of types that stand in signatures alone.
    assert set(missing) <= {"Flags", "WorkerFlags"}


@pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=lambda page: str(page.relative_to(DOCS)))
def test_no_page_is_too_long(page: Path):
    if page.relative_to(DOCS).parts[0] not in LONG:
        assert len(page.read_text().split()) <= WORDS


def test_the_reference_and_the_keyword_arguments_are_written_from_the_code():
    command = [sys.executable, DOCS / "reference" / "write.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_the_pictures_are_those_of_the_script():
    done = subprocess.run([sys.executable, DOCS / "pictures" / "draw.py", "--check"], timeout=60, check=False)
    assert done.returncode == 0, "python docs/pictures/draw.py"


def blocks(page: Path) -> Iterator[str]:
    for text in re.findall(r"^```python[^\n]*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
        yield text.replace("(...)", "()").replace("=...", "=None")


def there(name: str) -> bool:
    return hasattr(raytf, name) or name in ("data", "errors", "testing")


def mistakes(text: str, settings: dict[str, Setting]) -> Iterator[str]:
    """Names and arguments of raytf in a piece of code that there are not."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "raytf" and not there(node.attr):
            yield f"raytf.{node.attr}"
        if not isinstance(node, ast.Call):
            continue
        called, given = ast.unparse(node.func), {word.arg for word in node.keywords if word.arg}
        if called in ("raytf.TrainConfig", "raytf.TrainConfig.of"):
            yield from sorted(given - set(settings))
        elif re.fullmatch(r"raytf\.\w+", called) and hasattr(raytf, called[6:]):
            names = inspect.signature(getattr(raytf, called[6:])).parameters
            known = {*names, *FitSettings.__optional_keys__} if called == "raytf.fit" else set(names)
            yield from (f"{called}({name}=)" for name in sorted(given - known))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_on_pages_is_python_and_names_what_there_is(page: Path):
    settings = {its.name: its for its in every_setting()}
    assert [wrong for text in blocks(page) for wrong in mistakes(text, settings)] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("raytf.fitt()", ["raytf.fitt"]),
        ("raytf.fit(m, x, ephocs=3)", ["raytf.fit(ephocs=)"]),
        ("raytf.fit(m, x, workers=2)", []),
        ("raytf.TrainConfig.of(worker=3)", ["worker"]),
        ("raytf.TrainConfig(worker=3)", ["worker"]),
        ("raytf.fit(m, x, epochs=3, config=raytf.TrainConfig.of(workers='2'))", []),
    ],
)
def test_the_check_finds_what_there_is_not(text: str, wrong: list[str]):
    assert list(mistakes(text, {its.name: its for its in every_setting()})) == wrong
