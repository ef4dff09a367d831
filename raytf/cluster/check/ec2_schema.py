"""What EC2's RunInstances takes, from the service model that botocore ships; read as a file, since boto3 is slow."""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path as File
from typing import Any

from raytf.cluster.check.finding import ConfigFinding, Path, error, instead

_MODEL = "data/ec2/2016-11-15/service-2.json.gz"
#: Ray's own key of a node_config, which it turns into SubnetId.
_RAYS = {"SubnetIds"}
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "long": (int,),
    "boolean": (bool,),
    "double": (int, float),
    "float": (int, float),
    "structure": (dict,),
    "list": (list,),
    "map": (dict,),
}
_NAMES = {"string": "a text", "integer": "a whole number", "long": "a whole number", "boolean": "true or false"}
_NAMES |= {"structure": "a mapping", "list": "a list", "map": "a mapping", "double": "a number", "float": "a number"}


@cache
def _shapes() -> dict[str, Any]:
    spec = importlib.util.find_spec("botocore")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = File(folder) / _MODEL
        if path.is_file():
            return json.loads(gzip.decompress(path.read_bytes()))["shapes"]
    return {}


def check(config: dict[str, Any], path: Path) -> Iterator[ConfigFinding]:
    """Find keys, types and values of a node_config that RunInstances refuses."""
    shapes = _shapes()
    if shapes:
        given = {k: v for k, v in config.items() if k not in _RAYS}
        yield from _check(given, "RunInstancesRequest", path, shapes, _RAYS)


def _check(
    value: Any, name: str, path: Path, shapes: dict[str, Any], more: frozenset[str] | set[str] = frozenset()
) -> Iterator[ConfigFinding]:
    shape = shapes[name]
    kind = shape["type"]
    fits = _TYPES.get(kind)
    if path[-2:] == ("LaunchTemplate", "Version") and isinstance(value, int):
        return  # Ray makes a text of it
    if fits and (not isinstance(value, fits) or (isinstance(value, bool) and kind != "boolean")):
        quotes = kind == "string" and isinstance(value, int | float)
        yield error(
            "ec2-type",
            path,
            f"{path[-1]!r} is {value!r}, expected {_NAMES[kind]}",
            "boto3 refuses the call: `ray up` shows a traceback, or no worker ever starts.",
            f'Put it in quotes: "{value}".' if quotes else f"Give {_NAMES[kind]}.",
        )
    elif kind == "structure":
        members = shape["members"]
        for key, inner in value.items():
            if key in members:
                yield from _check(inner, members[key]["shape"], (*path, key), shapes)
            else:
                known = sorted({*members, *more})
                yield error(
                    "ec2-unknown-key",
                    (*path, str(key)),
                    f"EC2 takes no {key!r} here",
                    "boto3 refuses the call: `ray up` shows a traceback, or no worker ever starts.",
                    instead(key, known),
                )
    elif kind == "list":
        for i, item in enumerate(value):
            yield from _check(item, shape["member"]["shape"], (*path, i), shapes)
    elif "enum" in shape and value not in shape["enum"] and name != "InstanceType":
        yield error(
            "ec2-value",
            path,
            f"{path[-1]!r} is {value!r}",
            "EC2 refuses the call: `ray up` fails, or no worker ever starts.",
            instead(value, shape["enum"], "Give one of"),
        )
