"""No module of raytf or of benchmarks imports itself by way of others, at its top or inside a function.

Imports for type checkers alone do not count: they are not executed.
"""

from __future__ import annotations

import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]


def cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Groups of modules of which each one imports each other one, directly or by way of others (Tarjan)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    groups: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = lowest[module] = len(order)
        path.append(module)
        for other in sorted(imports[module]):
            if other not in order:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in path:
                lowest[module] = min(lowest[module], order[other])
        if lowest[module] == order[module]:
            group = path[path.index(module) :]
            del path[path.index(module) :]
            if len(group) > 1:
                groups.append(sorted(group))

    for module in sorted(imports):
        if module not in order:
            visit(module)
    return groups


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Of each module, the modules that it imports."""
    sys.path.insert(0, str(ROOT))
    try:
        graph = grimp.build_graph("raytf", "benchmarks", exclude_type_checking_imports=True, cache_dir=None)
    finally:
        sys.path.remove(str(ROOT))
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def test_no_module_imports_itself_by_way_of_others(imports: dict[str, set[str]]):
    assert {"raytf.training.worker", "benchmarks.all"} <= set(imports)
    assert cycles(imports) == []


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, []),
        ({"a": {"b"}, "b": {"a"}}, [["a", "b"]]),
        ({"a": {"b"}, "b": {"c"}, "c": {"d"}, "d": {"b"}}, [["b", "c", "d"]]),
        ({"a": {"c"}, "b": {"c"}, "c": set()}, []),
    ],
)
def test_the_check_finds_cycles(imports: dict[str, set[str]], expected: list[list[str]]):
    assert cycles(imports) == expected
