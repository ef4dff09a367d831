"""Fields of KubeRay's objects and of Kubernetes': names and types, for typos that an API server drops or refuses.

`kube_fields.json` has them, made from what both projects publish; `tests/data/make_kube_fields.py` says how. A key
stands for a field; its value is a type: `str` `int` `num` `bool` `quantity` `any`, the name of another type, `[x]` a
list, `{x}` a mapping, `=a|b` one of these texts; with `!` the field is required.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import Any

from raytf.doctor.finding import ConfigFinding, Path, error, instead, near

_QUANTITY = re.compile(r"[+-]?(\d+|\d+\.\d*|\.\d+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|n|u|e-?\d+|E-?\d+)?")
_WHY = "The API server refuses the object (strict), or drops the field without a word (older kubectl, Helm)."
_PLAIN = {"str": "a text", "int": "a whole number", "bool": "true or false", "num": "a number"}


@cache
def _known() -> dict[str, Any]:
    known: dict[str, Any] = json.loads(files(__package__).joinpath("kube_fields.json").read_text(encoding="utf-8"))
    return known


def knows(version: Any, kind: str) -> bool:
    """Return whether objects of a kind can be checked."""
    return isinstance(version, str) and kind in _known()["kinds"].get(version, ())


def is_quantity(value: Any) -> bool:
    """Return whether a value is a quantity of Kubernetes, such as 500m or 4Gi."""
    if isinstance(value, bool):
        return False
    return isinstance(value, int | float) or (isinstance(value, str) and _QUANTITY.fullmatch(value) is not None)


def check(value: Any, kind: str, path: Path) -> Iterator[ConfigFinding]:
    """Find fields that do not exist or have another type."""
    if kind == "any" or (value is None and kind not in _known()["types"]):
        return
    if kind.startswith("["):
        yield from _list(value, kind[1:-1], path)
    elif kind.startswith("{"):
        yield from _mapping(value, kind[1:-1], path)
    elif kind.startswith("="):
        yield from _choice(value, kind[1:].split("|"), path)
    elif kind == "quantity":
        yield from _quantity(value, path)
    elif kind not in _PLAIN:
        yield from _record(value, kind, path)
    elif not _is(value, kind):
        yield _wrong(value, _PLAIN[kind], path)


def _record(value: Any, kind: str, path: Path) -> Iterator[ConfigFinding]:
    if not isinstance(value, dict):
        yield _wrong(value, "a mapping", path)
        return
    fields: dict[str, str] = _known()["types"][kind]
    for key, inner in value.items():
        if key in fields:
            yield from check(inner, fields[key].removesuffix("!"), (*path, key))
        else:
            yield error(
                "kube-unknown-field",
                (*path, str(key)),
                f"there is no field {key!r} here",
                _WHY,
                instead(key, fields, "Fields here are"),
            )
    for key, inner in fields.items():
        if inner.endswith("!") and key not in value:
            yield error(
                "kube-missing-field", path, f"{key!r} is missing", "The API server refuses the object.", f"Add {key}."
            )


def _list(value: Any, kind: str, path: Path) -> Iterator[ConfigFinding]:
    if not isinstance(value, list):
        yield _wrong(value, "a list", path)
        return
    for i, item in enumerate(value):
        yield from check(item, kind, (*path, i))


def _mapping(value: Any, kind: str, path: Path) -> Iterator[ConfigFinding]:
    if not isinstance(value, dict):
        yield _wrong(value, "a mapping", path)
        return
    for key, inner in value.items():
        if inner is None and kind in _PLAIN:
            yield _wrong(inner, _PLAIN[kind], (*path, str(key)))
        else:
            yield from check(inner, kind, (*path, str(key)))


def _choice(value: Any, known: list[str], path: Path) -> Iterator[ConfigFinding]:
    if value not in known:
        yield error(
            "kube-value",
            path,
            f"{path[-1]} is {value!r}{near(value, known)}",
            "The API server refuses the object.",
            f"Write one of {', '.join(known)}.",
        )


def _quantity(value: Any, path: Path) -> Iterator[ConfigFinding]:
    if not is_quantity(value):
        gb = isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?\s?[KMGT]B", value, re.I)
        yield error(
            "kube-quantity",
            path,
            f"{value!r} is not a quantity",
            "The API server refuses the object.",
            f"Write {value[:-1].strip()}i." if gb else "Write one such as 500m, 4 or 16Gi.",
        )


def _is(value: Any, kind: str) -> bool:
    if kind == "str":
        return isinstance(value, str)
    if kind == "bool":
        return isinstance(value, bool)
    fits = (int,) if kind == "int" else (int, float)
    return isinstance(value, fits) and not isinstance(value, bool)


def _wrong(value: Any, wanted: str, path: Path) -> ConfigFinding:
    name = str(path[-1]) if path else "the object"
    quotes = wanted == "a text" and isinstance(value, bool | int | float)
    shown = {True: "true", False: "false"}.get(value, value) if isinstance(value, bool) else value
    kind = "a mapping" if isinstance(value, dict) else "a list" if isinstance(value, list) else repr(shown)
    return error(
        "kube-type",
        path,
        f"{name!r} is {kind}, expected {wanted}",
        "The API server refuses the object.",
        f'Put it in quotes: "{shown}".'
        if quotes
        else f"Give {wanted}, without quotes."
        if isinstance(value, str)
        else f"Give {wanted}.",
    )
