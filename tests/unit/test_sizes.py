"""A module fits into one reading, a function's arguments into one's head, and a test's name into a line of a report."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES, MOST_PARAMETERS = 600, 8
#: Of the name of a test; a commit's subject has as many.
MOST_CHARACTERS = 72
#: What people call with keyword arguments alone, and what it has is in its documentation.
PUBLIC = {
    "raytf/data/sources/csv.py:__init__",
    "raytf/data/sources/tfrecord.py:__init__",
    "raytf/driver/fit.py:fit",
}
#: Modules and functions that are too large and are to be divided. An entry that is not needed any more is an error.
TOO_LONG: set[str] = set()
TOO_MANY: set[str] = set()
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text() for path in sorted((ROOT / "raytf").rglob("*.py"))}


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """How many parameters a caller may give; `self`, `cls`, `*args` and `**kwargs` do not count."""
    given = function.args
    names = [parameter.arg for parameter in (*given.posonlyargs, *given.args)]
    return len(names) - (names[:1] in (["self"], ["cls"])) + len(given.kwonlyargs)


def too_many(text: str) -> list[str]:
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return [function.name for function in functions if parameters(function) > MOST_PARAMETERS]


def test_no_module_is_longer_than_600_lines():
    assert {name for name, text in TEXTS.items() if len(text.splitlines()) > MOST_LINES} == TOO_LONG


def test_no_function_has_more_than_8_parameters():
    found = {f"{name}:{function}" for name, text in TEXTS.items() for function in too_many(text)}
    assert found - PUBLIC == TOO_MANY
    assert found >= PUBLIC


def long_names(text: str) -> list[str]:
    """Return the names of tests that are too long."""
    names = re.findall(r"^ *(?:async )?def (test_\w+)", text, re.MULTILINE)
    return [name for name in names if len(name) > MOST_CHARACTERS]


def test_the_name_of_a_test_has_at_most_72_characters():
    files = sorted((ROOT / "tests").rglob("*.py"))
    assert files
    assert [f"{file.relative_to(ROOT)}:{name}" for file in files for name in long_names(file.read_text())] == []


@pytest.mark.parametrize("head", ["def ", "async def ", "    def "])
def test_the_check_finds_names_that_are_too_long(head: str):
    fits, long = "test_" + "a" * 67, "test_" + "a" * 68
    assert long_names(f"{head}{fits}(): ...\n{head}{long}(x): ...\n") == [long]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(a, b, c, d, e, f, g, h): ...", []),
        ("def f(a, b, c, d, e, f, g, h, i): ...", ["f"]),
        ("def f(a, b, c, d, /, e, f, *more, g, h, i=1): ...", ["f"]),
        ("async def f(a, b, c, d, e, f, g, h, i): ...", ["f"]),
        ("class C:\n    def f(self, a, b, c, d, e, f, g, h): ...", []),
        ("class C:\n    def f(self, a, b, c, d, e, f, g, h, i): ...", ["f"]),
        ("def f(a, b, c, d, e, f, g, h, *args, **kwargs): ...", []),
    ],
)
def test_the_count_of_parameters(text: str, expected: list[str]):
    assert too_many(text) == expected
