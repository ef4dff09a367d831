"""YAML that somebody else wrote: bounded in depth and size, and never anything but a `yaml.YAMLError`.

libyaml composes by recursion in C, which ends the process if brackets are nested deep enough. Its events come one by
one, so values are counted there first. PyYAML raises whatever Python raises for a number or a date.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

#: The C parser where PyYAML was built with it: a tenth of the time.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: A cluster has ten levels and a few hundred values; aliases of aliases make millions of ten lines.
LEVELS, VALUES = 100, 200_000
#: The most characters of a number. Nobody counts anything with a longer one, and Python refuses to print it.
_DIGITS = 100
TOO_DEEP = f"it is nested deeper than {LEVELS} levels"
_TOO_MANY = f"it holds more than {VALUES} values"
_KINDS = {"int": "whole number", "float": "number", "timestamp": "date or time", "bool": "truth value"}


class Loader(_Base):
    """PyYAML's safe loader, with constructors that raise only a YAMLError with a place."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = str(node.tag).rpartition(":")[2]
        try:
            if isinstance(node, yaml.ScalarNode) and kind in ("int", "float") and len(node.value) > _DIGITS:
                raise ValueError
            return super().construct_object(node, deep)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError):
            value = _short(node.value) if isinstance(node, yaml.ScalarNode) else "what stands here"
            problem = f"{value} is no {_KINDS.get(kind, kind)}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def nodes(text: str) -> Iterator[tuple[yaml.Node, Loader]]:
    """Yield each document of a text as a node, with the loader that makes values of it.

    Raises:
        yaml.YAMLError: it is not YAML, or too large or too deep.
    """
    count(text)
    loader = Loader(text)
    try:
        while loader.check_node():
            node = loader.get_node()
            size_of(node)
            yield node, loader
    finally:
        loader.dispose()


def load(text: str) -> Any:
    """Return the value of the only document, or None if there is none.

    Raises:
        yaml.YAMLError: as in `nodes`, or there are several documents.
    """
    documents = [loader.construct_document(node) for node, loader in nodes(text)]
    if len(documents) > 1:
        raise yaml.YAMLError("it holds several documents")
    return documents[0] if documents else None


def count(text: str) -> None:
    """Check the size and depth of a text event by event, which takes no stack.

    Raises:
        yaml.YAMLError: it is not YAML, or too deep or too large.
    """
    depth = values = 0
    for event in yaml.parse(text, Loader=_Base):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
            continue
        values += isinstance(event, yaml.NodeEvent)
        if depth > LEVELS or values > VALUES:
            problem = TOO_DEEP if depth > LEVELS else _TOO_MANY
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)


def size_of(node: yaml.Node) -> int:
    """Return the number of values that a node stands for, with those of its aliases.

    Raises:
        yaml.YAMLError: there are too many.
    """
    return _size(node, [], {})


def _size(node: yaml.Node, above: list[int], sizes: dict[int, int]) -> int:
    if isinstance(node, yaml.ScalarNode):
        return 1
    problem = None
    if id(node) in above:
        problem = "an alias refers to what it is in"
    elif len(above) > LEVELS:
        problem = TOO_DEEP
    elif id(node) not in sizes:
        above.append(id(node))
        parts = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
        sizes[id(node)] = 1 + sum(_size(part, above, sizes) for part in parts)
        above.pop()
    if problem is None and sizes[id(node)] > VALUES:
        problem = f"its aliases make more than {VALUES} values of it"
    if problem is not None:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return sizes[id(node)]


def _short(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:20]!r}... ({len(text)} characters)"
