"""A module fits into one reading, and a function's arguments into one's head."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES, MOST_PARAMETERS = 600, 8
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
