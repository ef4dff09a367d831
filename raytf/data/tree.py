"""Nested dicts, lists and tuples of arrays, flattened in one fixed order (dict keys sorted)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any


class Rows(tuple):
    """A leaf [records, rows, ...] of a batch whose parts differ in their number of rows: each record has several.

    It is a tuple, so that functions that traverse a tree preserve it.
    """

    __slots__ = ()


def flatten(tree: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return (path, leaf) pairs; None is an empty tree."""
    return list(_walk(tree, path))


def _walk(tree: Any, path: str) -> Iterator[tuple[str, Any]]:
    if tree is None:
        return
    if isinstance(tree, dict):
        for key in sorted(tree):
            yield from _walk(tree[key], f"{path}[{key!r}]")
    elif isinstance(tree, (list, tuple)):
        for i, part in enumerate(tree):
            yield from _walk(part, f"{path}[{i}]")
    else:
        yield path, tree


def unflatten(template: Any, leaves: Sequence[Any]) -> Any:
    """Return a tree of the template's structure with these leaves."""
    return _build(template, iter(leaves))


def _build(template: Any, leaves: Iterator[Any]) -> Any:
    if template is None:
        return None
    if isinstance(template, dict):
        built = {key: _build(template[key], leaves) for key in sorted(template)}
        return {key: built[key] for key in template}
    if isinstance(template, (list, tuple)):
        return _sequence(template, (_build(part, leaves) for part in template))
    return next(leaves)


def _sequence(template: Any, parts: Iterable[Any]) -> Any:
    """Return a list or a tuple of the template's class, which may be a named tuple."""
    return type(template)(*parts) if hasattr(template, "_fields") else type(template)(parts)


def map_leaves(function: Callable[[Any], Any], tree: Any) -> Any:
    """Return a tree of the same structure, with the function applied to each leaf."""
    return unflatten(tree, [function(leaf) for _, leaf in flatten(tree)])


def has_rows(tree: Any) -> bool:
    """Return whether a tree contains `Rows`."""
    if isinstance(tree, dict):
        tree = tuple(tree.values())
    return isinstance(tree, Rows) or (isinstance(tree, (list, tuple)) and any(map(has_rows, tree)))


def merged(tree: Any, merge: Callable[[Any], Any], other: Callable[[Any], Any] = lambda leaf: leaf) -> Any:
    """Return a tree in which each `Rows` is merged into one leaf, as the program passed it.

    Args:
        tree: a tree with or without `Rows`.
        merge: applied to the leaf in a `Rows`.
        other: applied to any other leaf.
    """
    if tree is None:
        return None
    if isinstance(tree, Rows):
        return merge(tree[0])
    if isinstance(tree, dict):
        return {key: merged(part, merge, other) for key, part in tree.items()}
    if isinstance(tree, (list, tuple)):
        return _sequence(tree, (merged(part, merge, other) for part in tree))
    return other(tree)
