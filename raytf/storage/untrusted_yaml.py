"""Reads untrusted YAML, with limits on depth and size; every failure is a `yaml.YAMLError`.

libyaml composes documents by recursion in C, so deeply nested brackets can crash the process. Its event stream does
not recurse, so values are counted there first. For an invalid number or date, PyYAML itself raises any Python error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import yaml

#: The C parser if PyYAML was built with it: it takes a tenth of the time.
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
#: A cluster file has ten levels and a few hundred values; aliases of aliases can turn ten lines into millions.
LEVELS, VALUES = 100, 200_000
#: The most characters of a number. Longer numbers are of no use, and Python refuses to print very long ones.
_DIGITS = 100
TOO_DEEP = f"it is nested deeper than {LEVELS} levels"
_TOO_MANY = f"it holds more than {VALUES} values"
_KINDS = {"int": "whole number", "float": "number", "timestamp": "date or time", "bool": "truth value"}


class Loader(_Base):
    """PyYAML's safe loader, with constructors that raise only a YAMLError with its position."""

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        kind = str(node.tag).rpartition(":")[2]
        try:
            if isinstance(node, yaml.ScalarNode) and kind in ("int", "float") and len(node.value) > _DIGITS:
                raise ValueError
            return super().construct_object(node, deep)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError):
            value = _short(node.value) if isinstance(node, yaml.ScalarNode) else "this value"
            problem = f"{value} is not a valid {_KINDS.get(kind, kind)}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def nodes(text: str) -> Iterator[tuple[yaml.Node, Loader]]:
    """Yield each document of a text as a node, with the loader that constructs its value.

    Raises:
        yaml.YAMLError: the text is not YAML, too large or too deep.
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
    """Check the size and depth of a text event by event, without recursion.

    Raises:
        yaml.YAMLError: the text is not YAML, too deep or too large.
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
    """Return the number of values in a node, with its aliases expanded.

    Raises:
        yaml.YAMLError: there are too many values.
    """
    return _size(node, [], {})


def _size(node: yaml.Node, above: list[int], sizes: dict[int, int]) -> int:
    if isinstance(node, yaml.ScalarNode):
        return 1
    problem = None
    if id(node) in above:
        problem = "an alias refers to a value that contains it"
    elif len(above) > LEVELS:
        problem = TOO_DEEP
    elif id(node) not in sizes:
        above.append(id(node))
        parts = node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
        sizes[id(node)] = 1 + sum(_size(part, above, sizes) for part in parts)
        above.pop()
    if problem is None and sizes[id(node)] > VALUES:
        problem = f"its aliases expand to more than {VALUES} values"
    if problem is not None:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)
    return sizes[id(node)]


def _short(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:20]!r}... ({len(text)} characters)"
