"""Texts about a model that are the same in every process: without layer numbers, addresses and lines of files."""

from __future__ import annotations

import base64
import functools
import hashlib
import inspect
import marshal
import re
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

#: Keras numbers unnamed layers, and Python shows the address of an object without a text of its own.
_NAME, _ADDRESS = re.compile(r'"name": "[^"]*"'), re.compile(r" at 0x[0-9a-fA-F]+")
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_LIBRARIES = (
    *{sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(Path(__file__).parents[1]) + "/",
)


def plainly(text: Any) -> str:
    """Return a text without the parts that differ between processes."""
    return _ADDRESS.sub("", _NAME.sub('"name": ""', str(text)))


def canonical(config: Any, of_here: bool = True) -> Any:
    """Return a model's configuration with layers numbered in their order, instead of the names that Keras assigned.

    Args:
        config: the configuration from Keras.
        of_here: whether this process created it, so that the code of its Lambda layers can be unmarshaled safely.
    """
    names: dict[str, str] = {}
    _collect(config, names)
    return _renamed(config, names, _lambda if of_here else lambda code: "")


def first_difference(old: Any, new: Any, path: str = "model") -> str:
    """Return the first difference between two configurations, for people; empty if they are the same."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted({*old, *new} - {"compile_config", "build_config", "registered_name"}):
            inner = path if key == "config" else f"{path}.{key}"
            difference = first_difference(old.get(key), new.get(key), inner)
            if difference:
                return difference
        return ""
    if isinstance(old, list) and isinstance(new, list):
        for i, (one, other) in enumerate(zip(old, new, strict=False)):
            difference = first_difference(one, other, f"{path}[{i}]")
            if difference:
                return difference
        return "" if len(old) == len(new) else f"{path}: {len(old)} in storage, {len(new)} now"
    return "" if old == new else f"{path}: {str(old)[:60]} in storage, {str(new)[:60]} now"


def _collect(part: Any, names: dict[str, str]) -> None:
    if isinstance(part, dict):
        inner = part.get("config")
        if "class_name" in part and isinstance(inner, dict) and isinstance(inner.get("name"), str):
            names.setdefault(inner["name"], f"#{len(names)}")
        for key in sorted(part, key=str):  # the order in files differs from that of configurations
            _collect(part[key], names)
    elif isinstance(part, (list, tuple)):
        for value in part:
            _collect(value, names)


def _renamed(part: Any, names: dict[str, str], code: Callable[[str], str]) -> Any:
    if isinstance(part, dict):
        inner = part.get("config")
        if part.get("class_name") == "__lambda__" and isinstance(inner, dict) and isinstance(inner.get("code"), str):
            return {"class_name": "__lambda__", "config": {**inner, "code": code(inner["code"])}}
        return {
            # The model's own name does not matter.
            key: _renamed(names.get(value, "") if key == "name" and isinstance(value, str) else value, names, code)
            for key, value in part.items()
        }
    if isinstance(part, (list, tuple)):
        return [_renamed(value, names, code) for value in part]
    if isinstance(part, str):
        return names.get(part, _ADDRESS.sub("", part))
    return part


def code_of(objects: Iterable[Any]) -> str:
    """Return a hash of the job's own code behind some objects, with the functions that it calls; empty if all code is
    from libraries. Comments, files and line numbers do not count."""
    codes: dict[str, str] = {}
    for item in objects:
        for function in _functions(item):
            _follow(function, codes)
    text = "\n".join(f"{name} {code}" for name, code in sorted(codes.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16] if codes else ""


def _functions(item: Any) -> Iterator[types.FunctionType]:
    """Yield the job's own functions of a function, a class or an object, including those of base classes."""
    if isinstance(item, functools.partial):
        item = item.func
    item = inspect.unwrap(getattr(item, "python_function", getattr(item, "__func__", item)))
    if isinstance(item, types.FunctionType):
        yield item
        return
    for kind in (item if isinstance(item, type) else type(item)).__mro__:
        for member in vars(kind).values():
            member = getattr(member, "fget", None) or getattr(member, "__func__", member)
            member = getattr(member, "python_function", member)
            if isinstance(member, types.FunctionType) and not _is_library(member):
                yield member


def _is_library(function: types.FunctionType) -> bool:
    file = function.__code__.co_filename
    return file.startswith(("<frozen", *_LIBRARIES)) or "site-packages" in file or "dist-packages" in file


def _follow(function: Any, codes: dict[str, str]) -> None:
    function = inspect.unwrap(function)
    if not isinstance(function, types.FunctionType) or _is_library(function):
        return
    name = f"{function.__module__}.{function.__qualname__}"
    # Several functions can have the same name, such as lambdas; each of them counts.
    code = code_text(function.__code__)
    if code in codes.get(name, ""):
        return
    codes[name] = codes.get(name, "") + code
    names = set(_names(function.__code__))
    used = {key: function.__globals__[key] for key in names if key in function.__globals__}
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=False)
    for key, cell in cells:
        try:
            used[key] = cell.cell_contents
        except ValueError:  # the cell is still empty
            continue
    used |= {f"default {i}": value for i, value in enumerate(function.__defaults__ or ())}
    for key, value in sorted(used.items()):
        if isinstance(value, _PLAIN):
            codes[name] += f" {key}={value!r}"
        elif isinstance(value, types.FunctionType):
            _follow(value, codes)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const)


def code_text(code: types.CodeType) -> str:
    """Return a text of compiled code without its file and line numbers."""
    consts = []
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            consts.append(code_text(const))
        elif isinstance(const, frozenset):
            consts.append(repr(sorted(map(repr, const))))
        else:
            consts.append(repr(const))
    return f"{code.co_code.hex()} {consts} {code.co_names} {code.co_varnames} {code.co_argcount}"


def _lambda(encoded: str) -> str:
    """Return the code of a Lambda layer that Keras serialized in this process, without its file and line numbers."""
    try:
        return code_text(marshal.loads(base64.b64decode(encoded)))
    except (ValueError, EOFError, TypeError):
        return encoded
