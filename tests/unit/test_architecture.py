"""docs/contributing/architecture.md is true: its picture is that of the import contract and of the folders, each path
that it names is there, and each entry too."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contributing" / "architecture.md"
TEXT = PAGE.read_text()
#: What a path of the page may begin with; `result.json` and `raytf.fit` are no paths.
TOPS = ("raytf/", "tests/", "docs/", "jobs/", "benchmarks/", "cluster-configs/", "dashboards/", ".ci/")


def section(heading: str) -> str:
    return TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def layers_of(picture: str) -> list[list[str]]:
    """The packages of each line of a picture, whose second column, two spaces away, is for people."""
    lines = re.findall(r"^ {4}(\S.*)$", picture, re.MULTILINE)
    return [re.split(r" {2,}", line)[0].split(" | ") for line in lines]


def contract() -> list[list[str]]:
    found = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (layers,) = (item["layers"] for item in found if item["type"] == "layers" and item["containers"] == ["raytf"])
    return [layer.split(" | ") for layer in layers]


def packages() -> set[str]:
    return {file.parent.name for file in (ROOT / "raytf").glob("*/__init__.py")}


def rows(heading: str) -> list[list[str]]:
    lines = re.findall(r"^\| (.+) \|$", section(heading), re.MULTILINE)
    return [line.split(" | ") for line in lines[2:]]


def paths(text: str) -> list[str]:
    return [code for code in re.findall(r"`([^`\s]+)`", text) if code.startswith(TOPS)]


def defines(dotted: str) -> bool:
    """Whether a name of raytf is there: a package, a module, or what a module defines on its own level."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:cut])
        file = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
        if not file.is_file():
            continue
        names = {
            node.name for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        return cut == len(parts) or (cut == len(parts) - 1 and parts[-1] in names)
    return False


def test_the_picture_has_the_layers_of_the_import_contract():
    assert layers_of(section("The picture")) == contract()


def test_the_picture_has_all_of_the_package():
    drawn = {name for layer in layers_of(section("The picture")) for name in layer}
    modules = {file.stem for file in (ROOT / "raytf").glob("*.py")} - {"__init__"}
    assert drawn == packages() | modules
    count = re.search(r"raytf is (\d+) packages in (\d+) layers", TEXT)
    assert count
    assert count.groups() == (str(len(packages())), str(len(contract())))


def test_each_package_has_one_sentence_and_an_entry():
    table = rows("Packages")
    assert sorted(row[0] for row in table) == sorted(f"`raytf/{name}/`" for name in packages())
    for package, sentence, entries in table:
        inside = package.strip("`/").replace("/", ".") + "."
        assert sentence.count(". ") == 0
        assert sentence.endswith(".")
        names = re.findall(r"`([^`]+)`", entries)
        assert names
        assert [name for name in names if not name.startswith(inside) or not defines(name)] == []


def test_each_package_inside_a_package_is_named():
    inner = {f"{file.parent.relative_to(ROOT)}/" for file in (ROOT / "raytf").glob("*/*/**/__init__.py")}
    assert inner <= set(paths(section("Packages")))


@pytest.mark.parametrize("path", sorted(set(paths(TEXT))))
def test_each_path_is_there(path: str):
    assert (ROOT / path).exists()


def test_the_reader_test_is_answered_by_files():
    table = rows("Where is ...?")
    assert len(table) >= 10
    for question, answer in table:
        assert question.endswith("?")
        assert [path for path in paths(answer) if (ROOT / path).is_file()]


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("raytf.driver", True),
        ("raytf.driver.fit", True),
        ("raytf.driver.fit.fit", True),
        ("raytf.driver.fit.fits", False),
        ("raytf.drivers.fit", False),
    ],
)
def test_the_check_finds_names_that_are_not_there(name: str, there: bool):
    assert defines(name) == there


def test_the_check_finds_a_picture_of_another_house():
    assert layers_of("\n    attic     things\n    stairs | hall      what is between\n") == [
        ["attic"],
        ["stairs", "hall"],
    ]
