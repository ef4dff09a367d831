"""docs/contributing/architecture.md is true: its picture is that of the import contract and of the folders, and each
path, entry, function and class that it names is there."""

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
    return rows_of(section(heading))


def rows_of(text: str) -> list[list[str]]:
    lines = re.findall(r"^\| (.+) \|$", text, re.MULTILINE)
    return [line.split(" | ") for line in lines[2:]]


def walks() -> dict[str, list[list[str]]]:
    """The rows of each walk through the code, by its heading."""
    return {text.partition("\n")[0]: rows_of(text) for text in section("Three walks").split("\n### ")[1:]}


def paths(text: str) -> list[str]:
    return [code for code in re.findall(r"`([^`\s]+)`", text) if code.startswith(TOPS)]


def defines(dotted: str) -> bool:
    """Whether a name of raytf is there: a package, a module, what a module defines on its own level, or a method."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:cut])
        file = base.with_suffix(".py") if base.with_suffix(".py").is_file() else base / "__init__.py"
        if file.is_file():
            return has_names(ast.parse(file.read_text()).body, parts[cut:])
    return False


def has_names(body: list[ast.stmt], names: list[str]) -> bool:
    """Whether statements define the first of some names, that has the second one inside, and so on."""
    if not names:
        return True
    definitions = [node for node in body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
    return any(
        has_names(node.body if isinstance(node, ast.ClassDef) else [], names[1:])
        for node in definitions
        if node.name == names[0]
    )


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


@pytest.mark.parametrize("walk", ["A batch", "A checkpoint", "A failure"])
def test_each_step_of_a_walk_names_functions_that_are_there(walk: str):
    steps = walks()[walk]
    assert len(steps) == 10
    for sentence, where in steps:
        assert sentence.endswith(".")
        names = re.findall(r"`([^`]+)`", where)
        assert names
        assert [name for name in names if not name.startswith("raytf.") or not defines(name)] == []


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("raytf.driver", True),
        ("raytf.driver.fit", True),
        ("raytf.driver.fit.fit", True),
        ("raytf.driver.fit.fits", False),
        ("raytf.drivers.fit", False),
        ("raytf.training.loop.TrainLoop.train", True),
        ("raytf.training.loop.TrainLoop.trains", False),
        ("raytf.driver.fit.fit.fit", False),
    ],
)
def test_the_check_finds_names_that_are_not_there(name: str, there: bool):
    assert defines(name) == there


def test_the_check_finds_a_picture_of_another_house():
    assert layers_of("\n    attic     things\n    stairs | hall      what is between\n") == [
        ["attic"],
        ["stairs", "hall"],
    ]
