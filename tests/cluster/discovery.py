"""Google's discovery documents, which come with google-api-python-client: routes, and what requests may hold."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Any

from tests.cluster.loopback import Request


@functools.cache
def document(name: str) -> dict[str, Any]:
    """A discovery document, such as compute.v1."""
    found = files("googleapiclient.discovery_cache.documents").joinpath(f"{name}.json")
    value: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    return value


def misfits(value: Any, schema: Mapping[str, Any], schemas: Mapping[str, Any], path: str = "") -> Iterator[str]:
    """What a schema of a discovery document refuses, in Google's words."""
    if "$ref" in schema:
        schema = schemas[schema["$ref"]]
    kind = schema.get("type")
    if kind == "object":
        if not isinstance(value, dict):
            yield f"Invalid value at '{path}' (type), expected an object, got {value!r}"
            return
        known = schema.get("properties", {})
        for key, inner in value.items():
            where = f"{path}.{key}" if path else key
            if key in known:
                yield from misfits(inner, known[key], schemas, where)
            elif "additionalProperties" in schema:
                yield from misfits(inner, schema["additionalProperties"], schemas, where)
            else:
                yield f"Unknown name \"{key}\" at '{path}': Cannot find field."
    elif kind == "array":
        if not isinstance(value, list):
            yield f"Invalid value at '{path}' (type), expected a list, got {value!r}"
            return
        for i, item in enumerate(value):
            yield from misfits(item, schema["items"], schemas, f"{path}[{i}]")
    elif kind != "any":
        yield from _scalar(value, schema, path)


def _scalar(value: Any, schema: Mapping[str, Any], path: str) -> Iterator[str]:
    kind = schema["type"]
    # 64 bits do not fit a number of JSON, so the type is string; Google takes both.
    numeric = kind == "integer" or str(schema.get("format", "")).endswith("int64")
    if numeric:
        good = (isinstance(value, int) and not isinstance(value, bool)) or (
            isinstance(value, str) and value.lstrip("-").isdigit()
        )
    else:
        good = isinstance(value, {"string": str, "boolean": bool, "number": float | int}[kind])
    if not good:
        yield f"Invalid value at '{path}' ({schema.get('format', kind)}), {value!r}"
    elif "enum" in schema and value not in schema["enum"]:
        yield f"Invalid value at '{path}' ({kind}), \"{value}\""
    elif "pattern" in schema and not re.fullmatch(schema["pattern"], str(value)):
        yield f"Invalid value for field '{path}': '{value}'. Must be a match of regex '{schema['pattern']}'"


@functools.cache
def routes(name: str) -> list[tuple[re.Pattern[str], str, dict[str, Any], dict[str, Any]]]:
    """(path, verb, method, schemas) for each method of a document."""
    found = document(name)

    def walk(resources: dict[str, Any]) -> Iterator[dict[str, Any]]:
        for resource in resources.values():
            yield from resource.get("methods", {}).values()
            yield from walk(resource.get("resources", {}))

    routes = []
    for method in walk(found["resources"]):
        path = f"/{found['servicePath']}{method.get('flatPath', method['path'])}"
        pattern = re.sub(r"\\\{(\w+)\\\}", r"(?P<\1>[^/:]+)", re.escape(path))
        allowed = {**found["parameters"], **method.get("parameters", {})}
        routes.append((re.compile(pattern), method["httpMethod"], {**method, "parameters": allowed}, found["schemas"]))
    return routes


def misplaced(request: Request, method: dict[str, Any]) -> Iterator[str]:
    """What a method refuses of a request's query."""
    for name, value in request.query.items():
        if method["parameters"].get(name, {}).get("location") != "query":
            yield f'Unknown name "{name}": Cannot bind query parameter.'
        else:
            yield from _scalar(value, {**method["parameters"][name], "type": "string"}, name)
    for name, parameter in method["parameters"].items():
        if parameter.get("required") and parameter["location"] == "query" and name not in request.query:
            yield f"Required parameter {name} is missing."
