"""The language of ARM templates, as much as Ray's use: what Azure makes of them before it starts anything.

Functions and names as in Microsoft's reference (learn.microsoft.com/azure/azure-resource-manager/templates). A
function that is not here is an error, so that a newer template of Ray's is seen.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str,
    "securestring": str,
    "int": int,
    "bool": bool,
    "object": dict,
    "secureobject": dict,
    "array": list,
}
_TOKEN = re.compile(r"\s*(?:'((?:[^']|'')*)'|(-?\d+)|([A-Za-z_]\w*)|([()\[\],.]))")


class InvalidTemplate(Exception):
    """What Azure says with the code InvalidTemplate."""


@dataclass(frozen=True)
class Scope:
    """Where a template is deployed.

    Attributes:
        subscription: its id.
        group: the resource group, as Azure shows it.
        reference: the properties of a deployed resource, by id or name.
    """

    subscription: str
    group: dict[str, Any]
    reference: Callable[[str], Any]


@dataclass
class Deployment:
    """A template with its parameters."""

    template: Mapping[str, Any]
    given: Mapping[str, Any]
    scope: Scope
    _index: int | None = field(default=None, init=False)

    def check(self) -> None:
        """Raise InvalidTemplate where parameters do not fit, or the template lacks what every template must have."""
        for key in ("$schema", "contentVersion", "resources"):
            if key not in self.template:
                raise InvalidTemplate(f"Required property '{key}' not found in JSON.")
        wanted = self.template.get("parameters", {})
        folded = {name.lower() for name in wanted}
        strangers = [name for name in self.given if name.lower() not in folded]
        if strangers:
            raise InvalidTemplate(
                "The following parameters were supplied, but do not correspond to any parameters defined in the "
                f"template: '{', '.join(strangers)}'. The parameters of the template are: '{', '.join(wanted)}'."
            )
        for name, parameter in wanted.items():
            value = self._given(name)
            if value is None and "defaultValue" not in parameter:
                raise InvalidTemplate(f"The value for the template parameter '{name}' is not provided.")
            kind = _TYPES[parameter["type"].lower()]
            if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
                raise InvalidTemplate(
                    f"The provided value for the template parameter '{name}' is not valid. Expected a value of type "
                    f"'{parameter['type']}', but received a value of type '{type(value).__name__}'."
                )

    def resources(self) -> Iterator[dict[str, Any]]:
        """Each resource that the template makes, without expressions, copies one by one; what it needs comes first."""
        waiting = list(self._planned())
        names = {id(item): {n.lower() for n in self._names(*item)} for item in waiting}
        while waiting:
            missing = {name for item in waiting for name in names[id(item)]}
            ready = [item for item in waiting if not missing & self._needs(*item)]
            if not ready:
                raise InvalidTemplate("Circular dependency detected")
            for item in ready:
                resource, self._index = item
                yield self.value({k: v for k, v in resource.items() if k not in ("copy", "condition", "dependsOn")})
                self._index = None
                waiting.remove(item)

    def _planned(self) -> Iterator[tuple[Mapping[str, Any], int | None]]:
        for resource in self.template["resources"]:
            count = self.value(resource["copy"]["count"]) if "copy" in resource else None
            for index in (None,) if count is None else range(count):
                if self.value(resource.get("condition", True)):
                    yield resource, index

    def _names(self, resource: Mapping[str, Any], index: int | None) -> Iterator[str]:
        """What others may call it in their dependsOn: its name, or its id."""
        self._index = index
        name = self.value(resource["name"])
        yield name
        yield self._id([resource["type"], name], of_group=True)
        self._index = None

    def _needs(self, resource: Mapping[str, Any], index: int | None) -> set[str]:
        self._index = index
        needs = {name.lower() for name in self.value(resource.get("dependsOn", []))}
        self._index = None
        return needs

    def outputs(self) -> dict[str, Any]:
        """What the deployment gives back; outputs made by copies are left out, as Ray reads none."""
        given = self.template.get("outputs", {})
        return {k: {"type": v["type"], "value": self.value(v["value"])} for k, v in given.items() if "value" in v}

    def value(self, raw: Any) -> Any:
        """A value of the template with its expressions evaluated; members that come to null are left out."""
        if isinstance(raw, dict):
            members = {self.value(key): self.value(inner) for key, inner in raw.items()}
            return {key: inner for key, inner in members.items() if inner is not None}
        if isinstance(raw, list):
            return [self.value(item) for item in raw]
        if isinstance(raw, str) and raw.startswith("[") and raw.endswith("]") and not raw.startswith("[["):
            return self._expression(raw[1:-1])
        return raw

    def _given(self, name: str) -> Any:
        return next((v.get("value") for k, v in self.given.items() if k.lower() == name.lower()), None)

    def _expression(self, text: str) -> Any:
        tokens: list[tuple[str, str]] = []
        at = 0
        while at < len(text.rstrip()):
            found = _TOKEN.match(text, at)
            if found is None:
                raise InvalidTemplate(f"Unable to parse language expression '{text}'")
            kind = ("text", "number", "name", "mark")[found.lastindex - 1] if found.lastindex else ""
            tokens.append((kind, found[found.lastindex or 0]))
            at = found.end()
        value, rest = self._parse(tokens)
        if rest:
            raise InvalidTemplate(f"Unable to parse language expression '{text}': expected its end, got {rest[0][1]!r}")
        return value()

    def _parse(self, tokens: list[tuple[str, str]]) -> tuple[Callable[[], Any], list[tuple[str, str]]]:
        """A value, not evaluated yet since `if` evaluates only one side, and the tokens behind it."""
        (kind, text), rest = tokens[0], tokens[1:]
        value: Callable[[], Any]
        if kind == "text":
            value = lambda: text.replace("''", "'")  # noqa: E731
        elif kind == "number":
            value = lambda: int(text)  # noqa: E731
        elif kind == "name" and rest[:1] == [("mark", "(")]:
            arguments, rest = self._arguments(rest[1:])
            value = lambda: self._call(text, arguments)  # noqa: E731
        else:
            raise InvalidTemplate(f"Unable to parse language expression at '{text}'")
        while rest and rest[0][1] in (".", "[") and rest[0][0] == "mark":
            value, rest = self._member(value, rest)
        return value, rest

    def _arguments(self, tokens: list[tuple[str, str]]) -> tuple[list[Callable[[], Any]], list[tuple[str, str]]]:
        found: list[Callable[[], Any]] = []
        while tokens[0] != ("mark", ")"):
            value, tokens = self._parse(tokens)
            found.append(value)
            if tokens[0] == ("mark", ","):
                tokens = tokens[1:]
        return found, tokens[1:]

    def _member(
        self, of: Callable[[], Any], tokens: list[tuple[str, str]]
    ) -> tuple[Callable[[], Any], list[tuple[str, str]]]:
        if tokens[0][1] == ".":
            name = tokens[1][1]
            return lambda: of()[name], tokens[2:]
        index, rest = self._parse(tokens[1:])
        if rest[0] != ("mark", "]"):
            raise InvalidTemplate("Unable to parse language expression: expected ']'")
        return lambda: of()[index()], rest[1:]

    def _call(self, name: str, lazy: list[Callable[[], Any]]) -> Any:
        name = name.lower()
        if name == "if":
            return lazy[1]() if lazy[0]() else lazy[2]()
        given = [argument() for argument in lazy]
        if name == "parameters":
            wanted = {k.lower(): v for k, v in self.template["parameters"].items()}
            if given[0].lower() not in wanted:
                raise InvalidTemplate(f"The template parameter '{given[0]}' is not found.")
            value = self._given(given[0])
            return self.value(wanted[given[0].lower()]["defaultValue"]) if value is None else value
        if name == "variables":
            folded = {k.lower(): v for k, v in self.template["variables"].items()}
            if given[0].lower() not in folded:
                raise InvalidTemplate(f"The template variable '{given[0]}' is not found.")
            return self.value(folded[given[0].lower()])
        if name == "copyindex":
            if self._index is None:
                raise InvalidTemplate("The template function 'copyIndex' is not expected at this location.")
            return self._index
        if name == "resourcegroup":
            return self.scope.group
        if name == "reference":
            return self.scope.reference(given[0])
        if name in ("resourceid", "subscriptionresourceid"):
            return self._id(given, of_group=name == "resourceid")
        if name not in _FUNCTIONS:
            raise InvalidTemplate(f"The template function '{name}' is not valid.")
        return _FUNCTIONS[name](*given)

    def _id(self, given: list[str], of_group: bool) -> str:
        group = self.scope.group["name"]
        if "/" not in given[0]:
            group, *given = given
        provider, *kinds = given[0].strip("/").split("/")
        if len(kinds) != len(given) - 1:
            raise InvalidTemplate(f"Unable to evaluate template language function 'resourceId': {given}")
        path = "/".join(part for pair in zip(kinds, given[1:], strict=True) for part in pair)
        middle = f"/resourceGroups/{group}" if of_group else ""
        return f"/subscriptions/{self.scope.subscription}{middle}/providers/{provider}/{path}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "concat": lambda *parts: "".join(_text(part) for part in parts),
    "createarray": lambda *items: list(items),
    "equals": lambda a, b: a == b,
    "greater": lambda a, b: a > b,
    "guid": lambda *parts: str(uuid.UUID(hashlib.md5("".join(parts).encode()).hexdigest())),
    "json": json.loads,
    "length": len,
    "mod": lambda a, b: a % b,
    "not": lambda a: not a,
    "string": _text,
}
