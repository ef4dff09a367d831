"""Files that are neither a cluster YAML of `ray up` nor manifests yet: each gets one sentence that says what it is."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error

#: Keys of a manifest below which no shell and no program expands a variable: a placeholder there is the author's.
_LITERAL = frozenset(
    ("metadata", "image", "rayVersion", "replicas", "minReplicas", "maxReplicas", "limits", "requests", "schedule")
    + ("nodeSelector", "serviceAccountName", "groupName", "claimName", "storageClassName", "bucketName")
)
_BRACES = re.compile(r"\{\{.*?\}\}")
_VARIABLE = re.compile(r"\$(\{[A-Za-z_]\w*\}|[A-Za-z_]\w*)")


@dataclass(frozen=True)
class OtherFormat:
    """A format of another tool.

    Attributes:
        name: the format, as in "this is NAME, not a `ray up` file".
        is_it: whether a mapping with these top-level keys and values is in this format.
        fix: how to use the file, and what raytf can check instead.
    """

    name: str
    is_it: Callable[[dict[str, Any]], bool]
    fix: str


def _is_kubectl_plugin(top: dict[str, Any]) -> bool:
    """Recognize ray-project/kuberay, kubectl-plugin/config/samples/create-cluster.complete.yaml."""
    return bool({"worker-groups", "ray-version"} & top.keys()) and "provider" not in top


#: Formats without the keys `apiVersion` and `kind` of a manifest.
FORMATS = (
    OtherFormat(
        "a configuration of the kubectl plugin for Ray",
        _is_kubectl_plugin,
        "Check what the plugin makes of it: kubectl ray create cluster NAME --file FILE --dry-run | raytf check -",
    ),
)


def check(text: str, documents: Sequence[Document], is_yaml: bool) -> ConfigFinding | None:
    """Return the one finding about a file in another format, or None if it is a cluster YAML or has manifests.

    Args:
        text: the file.
        documents: its documents, as far as they could be read.
        is_yaml: whether all of the text is YAML.
    """
    if not is_yaml:
        match = _BRACES.search(text)
        return match and _template(text[: match.start()].count("\n") + 1, match[0])
    for document in documents:
        top = document.mapping()
        if "apiVersion" in top and "kind" in top:
            for path, value in _literals(document.value, ()):
                if braces := _BRACES.search(value):
                    return _template(document.line(path), braces[0], path)
                if variable := _VARIABLE.search(value):
                    return _variable(document.line(path), variable[0], path)
        elif other := next((f for f in FORMATS if f.is_it(top)), None):
            what = f"this is {other.name}, not a `ray up` file"
            found = error("other-format", (), what, "`ray up` and raytf cannot start a cluster from it.", other.fix)
            return replace(found, line=1)
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
