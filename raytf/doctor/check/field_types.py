"""Checks the fields of KubeRay and Kubernetes objects and EC2 requests, to find typos that an API drops or refuses.

`tests/data/make_kube_fields.py` makes `kube_fields.json` from the schemas that KubeRay and Kubernetes publish. EC2's
fields come from botocore. A field's type is `str` `int` `num` `bool` `quantity` `any`, the name of another type, `[x]`
a list, `{x}` a mapping, or `=a|b` one of these strings. With `!` the field is required.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from raytf.doctor.finding import ConfigFinding, Path, error, instead
from raytf.doctor.local_environment import package_file

_QUANTITY = re.compile(r"[+-]?(\d+|\d+\.\d*|\.\d+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|n|u|e-?\d+|E-?\d+)?")
#: Type -> its name in messages, and a function that returns whether a value has it.
_SHAPES: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "str": ("a text", lambda value: isinstance(value, str)),
    "int": ("a whole number", lambda value: isinstance(value, int)),
    "num": ("a number", lambda value: isinstance(value, int | float)),
    "bool": ("true or false", lambda value: isinstance(value, bool)),
    "[": ("a list", lambda value: isinstance(value, list)),
    "{": ("a mapping", lambda value: isinstance(value, dict)),
}
_EC2_MODEL = "data/ec2/2016-11-15/service-2.json.gz"
_EC2_TYPES = {"string": "str", "integer": "int", "long": "int", "boolean": "bool", "double": "num", "float": "num"}
#: EC2 structure -> fields that Ray adds to it, or whose values Ray converts before it calls EC2.
_RAYS = {"RunInstancesRequest": {"SubnetIds": "any"}, "LaunchTemplateSpecification": {"Version": "any"}}


@dataclass(frozen=True)
class Api:
    """An API that validates the fields of the objects it receives.

    Attributes:
        fields: returns the fields of a type with their types, or None if the type has no fields.
        code: the prefix of its findings' codes.
        unknown: the code for an unknown field.
        lost, refused: the consequence of an unknown field, and of any other mistake.
        ignores_null: whether a null field counts as missing.
    """

    fields: Callable[[str], Mapping[str, str] | None]
    code: str
    unknown: str
    lost: str
    refused: str
    ignores_null: bool


@cache
def _kube() -> dict[str, Any]:
    known: dict[str, Any] = json.loads(files(__package__).joinpath("kube_fields.json").read_text(encoding="utf-8"))
    return known


@cache
def _ec2_shapes() -> dict[str, Any]:
    path = package_file("botocore", _EC2_MODEL)
    return json.loads(gzip.decompress(path.read_bytes()))["shapes"] if path is not None else {}


@cache
def _ec2_fields(name: str) -> dict[str, str] | None:
    shape = _ec2_shapes().get(name, {})
    if shape.get("type") != "structure":
        return None
    return {key: _ec2_type(member["shape"]) for key, member in shape["members"].items()} | _RAYS.get(name, {})


def _ec2_type(name: str) -> str:
    shape = _ec2_shapes()[name]
    if shape["type"] == "structure":
        return name
    if shape["type"] == "list":
        return f"[{_ec2_type(shape['member']['shape'])}]"
    if "enum" in shape and name != "InstanceType":  # instance types are checked against machines.csv
        return "=" + "|".join(shape["enum"])
    return _EC2_TYPES.get(shape["type"], "any")


KUBERNETES = Api(
    lambda name: _kube()["types"].get(name),
    "kube",
    "kube-unknown-field",
    "The API server refuses the object (strict), or drops the field without a warning (older kubectl, Helm).",
    "The API server refuses the object.",
    ignores_null=True,
)
_EC2_REFUSES = "boto3 refuses the call: `ray up` shows a traceback, or no worker ever starts."
EC2 = Api(_ec2_fields, "ec2", "ec2-unknown-key", _EC2_REFUSES, _EC2_REFUSES, ignores_null=False)


def knows(version: Any, kind: str) -> bool:
    """Return whether the fields of a kind of Kubernetes objects are known."""
    return isinstance(version, str) and kind in _kube()["kinds"].get(version, ())


def is_quantity(value: Any) -> bool:
    """Return whether a value is a Kubernetes quantity, such as 500m or 4Gi."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) or (isinstance(value, str) and _QUANTITY.fullmatch(value) is not None)


def check_node_config(config: Mapping[str, Any], path: Path) -> Iterator[ConfigFinding]:
    """Find keys, types and values of an EC2 node_config that RunInstances refuses."""
    if _ec2_shapes():
        yield from check(config, "RunInstancesRequest", path, EC2)


def check(value: Any, kind: str, path: Path, api: Api) -> Iterator[ConfigFinding]:
    """Find fields that do not exist, are missing or have another type."""
    fields, inner = api.fields(kind), kind[1:-1]
    if kind == "any" or (value is None and fields is None and api.ignores_null):
        return
    if kind == "quantity":
        yield from _quantity(value, path)
        return
    if kind.startswith("="):
        choices = kind[1:].split("|")
        if api is EC2 and not isinstance(value, str):
            yield _wrong_type(value, "a text", path, api)
        elif value not in choices:
            what = f"{path[-1]} is {value!r}"
            yield error(f"{api.code}-value", path, what, api.refused, instead(value, choices, "Write one of"))
        return
    shape = "{" if fields is not None else kind if kind in _SHAPES else kind[0]
    name, fits = _SHAPES[shape]
    if not fits(value) or (isinstance(value, bool) and shape != "bool"):
        yield _wrong_type(value, name, path, api)
    elif fields is not None:
        yield from _record(value, fields, path, api)
    elif shape == "[":
        for i, item in enumerate(value):
            yield from check(item, inner, (*path, i), api)
    elif shape == "{":
        for key, item in value.items():
            if item is None and inner in _SHAPES:  # only a field can be left out
                yield _wrong_type(item, _SHAPES[inner][0], (*path, str(key)), api)
            else:
                yield from check(item, inner, (*path, str(key)), api)


def _record(value: dict[str, Any], fields: Mapping[str, str], path: Path, api: Api) -> Iterator[ConfigFinding]:
    given = {key for key, item in value.items() if item is not None or not api.ignores_null}
    for key, inner in value.items():
        if key in fields and key not in given:
            continue
        if key in fields:
            yield from check(inner, fields[key].removesuffix("!"), (*path, key), api)
        else:
            fix = instead(key, fields, "Fields here are")
            yield error(api.unknown, (*path, str(key)), f"{key!r} is not a field here", api.lost, fix)
    for key in [key for key, inner in fields.items() if inner.endswith("!") and key not in given]:
        yield error(f"{api.code}-missing-field", path, f"{key!r} is missing", api.refused, f"Add {key}.")


def _quantity(value: Any, path: Path) -> Iterator[ConfigFinding]:
    if not is_quantity(value):
        in_bytes = isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?\s?[KMGT]B", value, re.I)
        fix = f"Write {value[:-1].strip()}i." if in_bytes else "Write a quantity such as 500m, 4 or 16Gi."
        yield error("kube-quantity", path, f"{value!r} is not a quantity", KUBERNETES.refused, fix)


def _wrong_type(value: Any, expected: str, path: Path, api: Api) -> ConfigFinding:
    name = str(path[-1]) if path else "the object"
    shown = str(value).lower() if isinstance(value, bool) else value
    kind = "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(shown)
    fix = f"Write {expected}."
    if expected == "a text" and isinstance(value, bool | int | float):
        fix = f'Put it in quotes: "{shown}".'
    elif isinstance(value, str):
        fix = f"Write {expected}, without quotes."
    return error(f"{api.code}-type", path, f"{name!r} is {kind}, expected {expected}", api.refused, fix)
