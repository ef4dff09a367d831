"""What Azure publishes of its resources: the models of the azure-mgmt-* packages, which Microsoft generates from its
API's specification (github.com/Azure/azure-rest-api-specs). A body is held against them: fields, types, values of
enumerations.
"""

from __future__ import annotations

import enum
import functools
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

#: Type of resource -> the package of its model, and its name there.
_MODELS = {
    "microsoft.compute/virtualmachines": ("azure.mgmt.compute.v2024_11_01.models", "VirtualMachine"),
    "microsoft.network/networkinterfaces": ("azure.mgmt.network.models", "NetworkInterface"),
    "microsoft.network/networksecuritygroups": ("azure.mgmt.network.models", "NetworkSecurityGroup"),
    "microsoft.network/publicipaddresses": ("azure.mgmt.network.models", "PublicIPAddress"),
    "microsoft.network/virtualnetworks": ("azure.mgmt.network.models", "VirtualNetwork"),
}
#: Ray needs no package for these two; the fields are those of Microsoft's reference of the API versions that Ray's
#: template names (Microsoft.Authorization 2022-04-01, Microsoft.ManagedIdentity 2024-11-30).
_TABLES: dict[str, dict[str, type]] = {
    "microsoft.authorization/roleassignments": {
        **dict.fromkeys(("condition", "conditionVersion", "delegatedManagedIdentityResourceId", "description"), str),
        **dict.fromkeys(("principalId", "principalType", "roleDefinitionId", "scope"), str),
    },
    "microsoft.managedidentity/userassignedidentities": {"isolationScope": str},
}
#: Enumerations that list only what there was when they were made, as their documentation says.
_OPEN = {"VirtualMachineSizeTypes"}
#: What belongs to a template and not to the resource.
_OF_TEMPLATE = {"apiVersion", "type", "name", "comments"}
_PLAIN: dict[str, type | tuple[type, ...]] = {
    "str": str,
    "int": int,
    "long": int,
    "float": (int, float),
    "bool": bool,
    "object": object,
    "iso-8601": str,
    "duration": str,
    "bytearray": str,
}


@dataclass
class _Node:
    """A mapping of the API: fields by their name in small letters, since Azure tells names apart without case."""

    fields: dict[str, tuple[str, Any]] = field(default_factory=dict)
    required: set[str] = field(default_factory=set)


def misfits(resource: Mapping[str, Any]) -> Iterator[str]:
    """What is wrong with a resource of a template whose expressions are evaluated."""
    kind = resource["type"].lower()
    body = {k: v for k, v in resource.items() if k not in _OF_TEMPLATE}
    for key in ("apiVersion", "name"):
        if key not in resource:
            yield f"{resource['type']}: {key} is missing"
    if kind in _TABLES:
        for key in body.keys() - {"location", "properties", "tags"}:
            yield f"{resource['type']}: no member '{key}'"
        for key, value in body.get("properties", {}).items():
            if not isinstance(value, _TABLES[kind].get(key, ())):
                yield f"{resource['type']}: Could not find member '{key}' on object of type 'properties'"
    elif kind in _MODELS:
        module, name = _MODELS[kind]
        for found in _object(body, _tree(module, name), module, ""):
            yield f"{resource['type']}: {found}"
    else:
        yield f"{resource['type']}: no type that is known here"


def tidy(resource: Mapping[str, Any]) -> dict[str, Any]:
    """A resource as Azure shows it later: names of fields have the case that Azure gives them."""
    kind = resource["type"].lower()
    if kind not in _MODELS:
        return dict(resource)
    module, name = _MODELS[kind]
    body = {k: v for k, v in resource.items() if k not in _OF_TEMPLATE}
    found: dict[str, Any] = _tidied(body, _tree(module, name), module)
    return {**found, "type": resource["type"], "name": resource["name"]}


def _tidied(value: Any, kind: Any, module: str) -> Any:
    if isinstance(kind, str):
        if kind.startswith("[") and isinstance(value, list):
            return [_tidied(item, kind[1:-1], module) for item in value]
        if kind.startswith("{") and isinstance(value, dict):
            return {key: _tidied(inner, kind[1:-1], module) for key, inner in value.items()}
        if kind[0] in "[{" or kind in _PLAIN:
            return value
        kind = _tree(module, kind)
    if isinstance(kind, _Node):
        return {
            kind.fields[key.lower()][0]: _tidied(v, kind.fields[key.lower()][1], module) for key, v in value.items()
        }
    return value


def _object(value: Any, node: _Node, module: str, path: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"'{path}' is {value!r}, expected an object"
        return
    seen = set()
    for key, inner in value.items():
        where = f"{path}.{key}" if path else key
        seen.add(key.lower())
        if key.lower() not in node.fields:
            yield f"Could not find member '{key}' on object of type '{path or 'resource'}'"
            continue
        yield from _value(inner, node.fields[key.lower()][1], module, where)
    for key in sorted(node.required - seen):
        yield f"Required parameter '{path}.{key}' is missing (null)"


def _value(value: Any, kind: Any, module: str, path: str) -> Iterator[str]:
    if isinstance(kind, _Node):
        yield from _object(value, kind, module, path)
    elif isinstance(kind, type) and issubclass(kind, enum.Enum):
        # An empty text is no value to Azure.
        if not isinstance(value, str) or value.lower() not in {"", *(str(m.value).lower() for m in kind)}:
            yield f"The value '{value}' of parameter '{path}' is not allowed. Allowed: {[m.value for m in kind]}"
    elif kind.startswith("["):
        if not isinstance(value, list):
            yield f"'{path}' is {value!r}, expected a list"
            return
        for i, item in enumerate(value):
            yield from _value(item, kind[1:-1], module, f"{path}[{i}]")
    elif kind.startswith("{"):
        if not isinstance(value, dict):
            yield f"'{path}' is {value!r}, expected an object"
            return
        for key, inner in value.items():
            yield from _value(inner, kind[1:-1], module, f"{path}.{key}")
    elif kind in _PLAIN:
        good = isinstance(value, _PLAIN[kind]) and (kind in ("bool", "object") or not isinstance(value, bool))
        if not good:
            yield f"'{path}' is {value!r}, expected {kind}"
    else:
        yield from _object(value, _tree(module, kind), module, path)


@functools.cache
def _tree(module: str, name: str) -> _Node:
    """The fields of a model, with those that the package shows flat put back where they are in the API."""
    models = importlib.import_module(module)
    model = getattr(models, name)
    root = _Node()
    for attribute, entry in model._attribute_map.items():
        node = root
        *above, last = re.split(r"(?<!\\)\.", entry["key"])
        for part in above:
            node = node.fields.setdefault(part.lower(), (part, _Node()))[1]
        node.fields[last.lower()] = (last, _enumeration(models, model, attribute) or entry["type"])
        if model._validation.get(attribute, {}).get("required") and not above:
            root.required.add(last.lower())
    return root


def _enumeration(models: Any, model: type, attribute: str) -> type[enum.Enum] | None:
    """The enumeration that a text is of: only the model's documentation names it."""
    for above in model.__mro__:
        text = re.sub(r"\s+", " ", above.__doc__ or "")
        found = re.search(rf":vartype {attribute}: str or ~[\w.]+\.(\w+)(?= |$)", text)
        if found and found[1] not in _OPEN:
            kind = getattr(models, found[1], None)
            return kind if isinstance(kind, type) and issubclass(kind, enum.Enum) else None
    return None
