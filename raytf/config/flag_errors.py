"""Check a command line before anything reads it, and report the first problem in one line."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from raytf.config import flags
from raytf.config.flags import Flag, FlagGroup

_EXPECTED = {int: "a whole number", float: "a number"}
_SWITCHED = ("true", "false", "none")


def wrong(groups: Sequence[FlagGroup], args: Sequence[str]) -> str:
    """Return the first problem of a command line; empty if there is none.

    Args:
        groups: the flags of the command.
        args: what was typed after its name.
    """
    known = flags.by_name(groups)
    places = [flag for group in groups for flag in group.flags if flag.is_positional]
    several, filled, at = any(flag.takes_several for flag in places), 0, 0
    met: set[Flag] = set()
    while at < len(args):
        text, at = args[at], at + 1
        if not _is_name(text):
            filled += 1
            if filled > len(places) and not several:
                return f"{text}: expected a flag, such as --help."
            continue
        name, equals, assigned = text.partition("=")
        flag = known.get("--" + name[2:].replace("_", "-"))
        if flag is None:
            return _unknown(name, list(known))
        met.add(flag)
        values = [assigned] if equals else []
        while not equals and at < len(args) and not _is_name(args[at]) and _takes(flag, len(values), args[at]):
            values.append(args[at])
            at += 1
        problem = _wrong_values(flag, name, values)
        if problem:
            return problem
    needed = [flag.value for flag in places if flag.is_needed][filled:]
    needed += [f"{flag.names[0]} {flag.value}" for flag in _named(groups) if flag.is_needed and flag not in met]
    return f"expected {needed[0]}. --help says more." if needed else ""


def _named(groups: Sequence[FlagGroup]) -> list[Flag]:
    return [flag for group in groups for flag in group.flags if not flag.is_positional]


def _is_name(text: str) -> bool:
    if not text.startswith("-") or text == "-":
        return False
    try:
        float(text)
    except ValueError:
        return True
    return False  # a number below zero


def _takes(flag: Flag, count: int, text: str) -> bool:
    """Return whether a flag takes one more value."""
    if flag.is_switch:
        return flag.setting.default is None and text.lower() in _SWITCHED
    return count < len(flag.parts) if flag.parts else flag.takes_several or count == 0


def _unknown(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name.lstrip("-"), [flag.lstrip("-") for flag in known], n=1)
    hint = f"Did you mean --{near[0]}?" if near else "--help lists the flags."
    return f"{name}: unknown flag. {hint}"


def _wrong_values(flag: Flag, name: str, values: Sequence[str]) -> str:
    if flag.is_switch:
        return ""
    kinds = flag.setting.kinds
    is_open = flag.setting.default is None
    expected = f"one of {', '.join(flag.setting.choices)}" if flag.setting.choices else _EXPECTED.get(kinds[0], "")
    if not values:
        return f"{name}: expected {expected or 'a value'}, such as {name} {_example(flag)}."
    if flag.parts:
        is_right = len(values) == len(flag.parts) and all(map(_is_of, values, flag.parts))
        if is_right or (is_open and values == ["None"]):
            return ""
        return f"{' '.join([name, *values])}: expected {flag.value}."
    for value in values:
        if is_open and value == "None":
            continue
        if flag.setting.choices and value not in flag.setting.choices:
            near = difflib.get_close_matches(value, flag.setting.choices, n=1)
            return f"{name} {value}: expected {expected}.{f' Did you mean {near[0]}?' if near else ''}"
        if kinds[0] in (int, float) and not _is_of(value, kinds[0]):
            return f"{name} {value}: expected {expected}."
    return ""


def _is_of(text: str, kind: type) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _example(flag: Flag) -> str:
    default = flag.setting.default
    if flag.setting.choices:
        return flag.setting.choices[0]
    if isinstance(default, (int, float, str)) and str(default):
        return f"{default:g}" if isinstance(default, float) else str(default)
    return {int: "2", float: "0.5"}.get(flag.setting.kinds[0], flag.value)
