"""Recognizes templates, which a tool such as Helm or envsubst has to fill in before Ray or Kubernetes reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error

#: Keys of a manifest below which no shell and no program expands a variable: a placeholder there is the author's.
_LITERAL = frozenset(
    ("metadata", "image", "rayVersion", "replicas", "minReplicas", "maxReplicas", "limits", "requests", "schedule")
    + ("nodeSelector", "serviceAccountName", "groupName", "claimName", "storageClassName", "bucketName")
)
_BRACES = re.compile(r"\{\{.*?\}\}")
#: Braces in a text that is not YAML: where a value or a line begins, and so not in a quoted string of a command.
_UNQUOTED = re.compile(r"(?m)^\s*(?:-\s+)?(?:[\w./-]+:\s+)?[\w./:-]*(\{\{.*?\}\})")
_VARIABLE = re.compile(r"\$(\{[A-Za-z_]\w*\}|[A-Za-z_]\w*)")


def find(text: str, documents: Sequence[Document], is_yaml: bool) -> ConfigFinding | None:
    """Return the one finding about a template, or None if everything is filled in.

    Args:
        text: the file.
        documents: its documents, as far as they could be read.
        is_yaml: whether all of the text is YAML.
    """
    if not is_yaml:
        match = _UNQUOTED.search(text)
        return match and _template(text[: match.start(1)].count("\n") + 1, match[1])
    for document in documents:
        top = document.mapping()
        if "apiVersion" in top and "kind" in top:
            for path, value in _literals(document.value, ()):
                if braces := _BRACES.search(value):
                    return _template(document.line(path), braces[0], path)
                if variable := _VARIABLE.search(value):
                    return _variable(document.line(path), variable[0], path)
    return None


def _template(line: int | None, found: str, path: Path = ()) -> ConfigFinding:
    what = f"the file is a template: {found} is not filled in"
    fix = "Render it first, such as with Helm: helm template NAME CHART | raytf check -"
    why = "Ray and Kubernetes read only what a tool such as Helm makes of it."
    return replace(error("template", path, what, why, fix), line=line)


def _variable(line: int | None, found: str, path: Path) -> ConfigFinding:
    what = f"the manifest is a template: {found} is not filled in"
    fix = "Fill in the variables first: envsubst < FILE | raytf check -"
    return replace(error("template", path, what, "Kubernetes expands no variables here.", fix), line=line)


def _literals(value: Any, path: Path) -> Iterator[tuple[Path, str]]:
    """Yield each string of a manifest at whose place a placeholder is never expanded, with its path."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key not in ("annotations", "data", "stringData"):  # texts of other tools
                yield from _literals(inner, (*path, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _literals(inner, (*path, i))
    elif isinstance(value, str) and not re.search(r"\s", _BRACES.sub("", value)):
        is_whole_variable = path[-1:] == ("value",) and "env" in path and _VARIABLE.fullmatch(value)
        if is_whole_variable or not _LITERAL.isdisjoint(path):
            yield path, value
