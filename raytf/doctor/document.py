"""A cluster's YAML with the line of each value, and the cloud or hosts that it is for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import yaml

from raytf.doctor.finding import ConfigFinding, Path, error
from raytf.storage import untrusted_yaml


@dataclass(frozen=True)
class Document:
    """One document of a file.

    Attributes:
        value: its content, with all keys converted to strings.
        lines: path -> line, counted from 1. A value in a mapping has the line of its key.
        odd_keys: paths of keys that YAML does not read as strings but, for example, as numbers.
        is_ours: whether raytf's own node provider reads the file; `fallbacks.as_cloud` sets it.
    """

    value: Any
    lines: dict[Path, int] = field(default_factory=dict)
    odd_keys: tuple[Path, ...] = ()
    is_ours: bool = False

    def line(self, path: Path) -> int | None:
        """Return the line of a path, or of the nearest part of it that exists."""
        for end in range(len(path), -1, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return None

    def get(self, *path: str | int, default: Any = None) -> Any:
        """Return the value at a path, or the default if a part of the path is missing or has another type."""
        value = self.value
        for part in path:
            in_mapping = isinstance(value, dict) and part in value
            if in_mapping or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
                value = value[part]
            else:
                return default
        return value

    def mapping(self, *path: str | int) -> dict[str, Any]:
        """Return the mapping at a path, or an empty one if there is none."""
        value = self.get(*path)
        return {str(k): v for k, v in value.items()} if isinstance(value, dict) else {}

    def sequence(self, *path: str | int) -> list[Any]:
        """Return the list at a path, or an empty one if there is none."""
        value = self.get(*path)
        return value if isinstance(value, list) else []

    def with_lines(self, findings: Iterable[ConfigFinding]) -> list[ConfigFinding]:
        """Return the findings; each that has no line yet gets the line of its path."""
        return [f if f.line is not None else replace(f, line=self.line(f.path)) for f in findings]

    def commands(self, *keys: str, below: Path = ()) -> Iterator[tuple[Path, str]]:
        """Yield the path and text of each shell command in the lists at several keys."""
        for key in keys:
            for i, command in enumerate(self.sequence(*below, key)):
                if isinstance(command, str):
                    yield (*below, key, i), command


def parse(text: str) -> tuple[list[Document], list[ConfigFinding]]:
    """Return all nonempty documents of a file, and the mistakes in its YAML."""
    documents: list[Document] = []
    findings: list[ConfigFinding] = []
    try:
        for node, loader in untrusted_yaml.nodes(text):
            findings += _doubles(node, ())
            value = loader.construct_document(node)
            lines: dict[Path, int] = {}
            _walk(node, (), lines)
            if value is not None:
                odd: list[Path] = []
                documents.append(Document(_with_texts(value, (), odd), lines, tuple(odd)))
    except yaml.YAMLError as problem:
        findings.append(_syntax(problem, text))
    return documents, findings


def _with_texts(value: Any, path: Path, odd: list[Path]) -> Any:
    if isinstance(value, dict):
        odd += [(*path, str(key)) for key in value if not isinstance(key, str)]
        return {str(key): _with_texts(inner, (*path, str(key)), odd) for key, inner in value.items()}
    if isinstance(value, list):
        return [_with_texts(inner, (*path, i), odd) for i, inner in enumerate(value)]
    return value


def _syntax(problem: yaml.YAMLError, text: str) -> ConfigFinding:
    mark = getattr(problem, "problem_mark", None)
    description = str(getattr(problem, "problem", None) or problem).splitlines()[0]
    line = mark.line + 1 if mark else 1 + text[: getattr(problem, "position", None) or 0].count("\n")
    source = text.splitlines()[mark.line] if mark and mark.line < len(text.splitlines()) else ""
    if "\t" in source[: len(source) - len(source.lstrip())]:
        fix = "Indent with spaces: YAML allows no tabs there."
    elif "mapping values are not allowed" in description:
        fix = "Put the value in quotes if it contains ': ', or fix the indentation of this line or the one before."
    else:
        fix = "Fix this line or the one before. Often the indentation, a bracket or a quote is wrong."
    finding = error("yaml-syntax", (), f"this is not YAML: {description}", "Ray cannot read the file.", fix)
    return replace(finding, line=line)


def _doubles(node: yaml.Node, path: Path) -> Iterator[ConfigFinding]:
    if isinstance(node, yaml.MappingNode):
        seen: dict[str, int] = {}
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            if name in seen and name != "<<":
                what = f"{name!r} appears twice, first in line {seen[name]}"
                why = "YAML keeps the last one and silently drops the first."
                finding = error("duplicate-key", (*path, name), what, why, "Merge the two, or delete one.")
                yield replace(finding, line=key.start_mark.line + 1)
            seen.setdefault(name, key.start_mark.line + 1)
            yield from _doubles(value, (*path, name))
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield from _doubles(item, (*path, i))


def _walk(node: yaml.Node, path: Path, lines: dict[Path, int]) -> None:
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = (*path, key.value if isinstance(key, yaml.ScalarNode) else "")
            lines[inner] = key.start_mark.line + 1
            _walk(value, inner, lines)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            _walk(item, (*path, i), lines)


CLOUDS = ("aws", "gcp", "azure")


class Platform(StrEnum):
    """The cloud or hosts on which the nodes run."""

    AWS = "aws"
    GCP = "gcp"
    AZURE = "azure"
    HOSTS = "local"
    OTHER = "other"


#: Key of a node_config -> the only platform that uses it, which identifies the platform of an external provider.
_SIGNS = {
    "InstanceType": Platform.AWS,
    "machineType": Platform.GCP,
    "runtimeVersion": Platform.GCP,
    "azure_arm_parameters": Platform.AZURE,
}


def place_of(document: Document) -> Platform:
    """Return the platform that a cluster YAML is for."""
    kind = document.get("provider", "type")
    if isinstance(kind, str) and kind in (*CLOUDS, "local"):
        return Platform(kind)
    if kind == "external":
        for name in document.mapping("available_node_types"):
            for key in document.mapping("available_node_types", name, "node_config"):
                if key in _SIGNS:
                    return _SIGNS[key]
    return Platform.OTHER
