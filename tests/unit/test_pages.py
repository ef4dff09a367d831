"""Tables of docs/ are shown as tables, and code blocks fit into the column."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.stress import as_typed

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
#: Characters of a line of code that the site shows without scrolling, in a window of 1280 pixels.
COLUMNS = 80
#: Output that was recorded, a picture of the packages, and pages that are written from the code.
AS_IT_IS = ("evidence", "contributing", "reference")
#: Elements in which a line that looks like a row of a table is text.
_CODE = ("code", "pre", "script", "style")
_ROW = re.compile(r"^[ \t]*\|.*\|[ \t]*$", re.MULTILINE)


class _Text(HTMLParser):
    """Collect the text of a page outside of its code, and the headings of its tables."""

    def __init__(self) -> None:
        super().__init__()
        self.text: list[str] = []
        self.headings: list[str] = []
        self._code, self._heading = 0, False

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self._code += tag in _CODE
        if tag == "th":
            self._heading = True
            self.headings.append("")

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in _CODE
        if tag == "th":
            self._heading = False

    def handle_data(self, data: str) -> None:
        if self._heading:
            self.headings[-1] += data
        if not self._code:
            self.text.append(data)


def extensions() -> tuple[list[str], dict[str, Any]]:
    """The Markdown extensions of the site, with their settings: those of mkdocs.yml, and those that mkdocs adds."""
    names, settings = ["toc", "tables", "fenced_code"], dict[str, Any]()
    for entry in yaml.safe_load((ROOT / "mkdocs.yml").read_text())["markdown_extensions"]:
        for name, values in (entry if isinstance(entry, dict) else {entry: {}}).items():
            names.append(name)
            settings[name] = values or {}
    return list(dict.fromkeys(names)), settings


def rendered(text: str) -> _Text:
    """Render a page as the site does."""
    markdown = pytest.importorskip("markdown")
    pytest.importorskip("pymdownx")
    names, settings = extensions()
    page = _Text()
    page.feed(markdown.markdown(text, extensions=names, extension_configs=settings))
    page.close()
    return page


def stray_rows(text: str) -> list[str]:
    """Return the rows of tables that a page shows as running text."""
    return [row.strip() for row in _ROW.findall("".join(rendered(text).text))]


def code_lines(text: str) -> Iterator[str]:
    """Yield the lines of a page's code blocks."""
    fence = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            fence = not fence
        elif fence:
            yield line
        elif line.startswith("    ") and not re.match(r" +([-*] |\d+\. )", line):
            yield line.removeprefix("    ")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_no_row_of_a_table_is_running_text(page: Path):
    assert stray_rows(page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(DOCS)))
def test_code_fits_the_column(page: Path):
    if page.relative_to(DOCS).parts[0] not in AS_IT_IS:
        assert [line for line in code_lines(page.read_text()) if len(line) > COLUMNS] == []


def test_tables_of_the_first_pages_have_headings():
    for name in ("index.md", "getting-started/installation.md", "getting-started/starting-over.md"):
        headings = rendered((DOCS / name).read_text()).headings
        assert headings, name
        assert "" not in headings, name


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("| a | b |\n| --- | --- |\n| 1 | 2 |\n", []),
        ("| a | b |\n| --- | --- |\n| 1 | 2 |\n\n| 3 | 4 |\n", ["| 3 | 4 |"]),
        ("Words, and no blank line:\n| a |\n| --- |\n| `1` |\n", ["| a |", "| --- |", "|  |"]),
        ("```\n| a | b |\n```\n\n    | a | b |\n\nsee `| a | b |`\n", []),
        ("- item\n\n| a |\n", ["| a |"]),
    ],
)
def test_the_check_finds_rows_outside_of_tables(text: str, rows: list[str]):
    assert stray_rows(text) == rows


def test_a_command_that_goes_on_after_a_backslash_is_typed_as_one():
    page = "```sh\npython -m pip install x\none \\\n    two\nthree\n```\n\n```text\nfour\n```\n"
    assert as_typed.commands(page) == ["python -m pip install x", "one \\\n    two", "three"]
