"""The flags of a command, which are the fields of its dataclass and of nested dataclasses; the `--help` page; and the
check of a command line.

tyro parses the flags. This module replaces tyro's help, which lists all flags, and its errors, which fill a screen.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import textwrap
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from raytf.config import setting
from raytf.config.setting import APPENDED, POSITIONAL, Rest, Setting, Usual

_EXPECTED = {int: "a whole number", float: "a number"}
_SWITCHED = ("true", "false", "none")
#: Width of the left column of the help page, which has the flags.
_LEFT = 30


@dataclass(frozen=True)
class FlagGroup:
    """The flags of one dataclass, without the flags of nested dataclasses."""

    kind: type
    flags: tuple[Setting, ...]

    @property
    def about(self) -> str:
        return inspect.getdoc(self.kind) or ""


def of_command(main: Callable[[Any], object]) -> list[FlagGroup]:
    """Return the flags of a command, grouped by dataclass, with the command's own dataclass first.

    Args:
        main: a function with one argument.

    Returns:
        The groups; empty if the argument is not a dataclass, as for a command with subcommands, or if only tyro
        can read one of the flags.
    """
    hints = typing.get_type_hints(inspect.unwrap(main), include_extras=True)
    hints.pop("return", None)
    kind = setting.plain(next(iter(hints.values()), None))
    if len(hints) != 1 or not dataclasses.is_dataclass(kind):
        return []
    groups = list(_groups(kind)) or [FlagGroup(typing.cast(type, kind), ())]
    return groups if all(map(_is_plain, _all(groups))) else []


def texts(section: type) -> dict[str, str]:
    """Return the docstring of each field of a dataclass, inherited fields first; empty if the source is unavailable."""
    by_field: dict[str, str] = {}
    for kind in reversed(section.__mro__[:-1]):
        try:
            [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        except (OSError, TypeError):  # the class was not defined in a file
            continue
        body = typing.cast(ast.ClassDef, tree).body
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                by_field[typing.cast(ast.Name, field.target).id] = " ".join(str(text.value.value).split())
    return by_field


def by_name(groups: Sequence[FlagGroup]) -> dict[str, Setting]:
    """Return the flags by name; a flag with two names has two entries."""
    return {name: flag for flag in _all(groups) for name in flag.flag_names}


def _all(groups: Sequence[FlagGroup]) -> list[Setting]:
    return [flag for group in groups for flag in group.flags]


def _groups(kind: Any) -> Iterator[FlagGroup]:
    inner = [its.kind for its in setting.of(kind) if dataclasses.is_dataclass(its.kind)]
    own = tuple(its for its in setting.of(kind) if not dataclasses.is_dataclass(its.kind))
    if own:
        yield FlagGroup(kind, own)
    for section in inner:
        yield from _groups(section)


def _is_plain(flag: Setting) -> bool:
    """Return whether a flag's name and values follow from its field alone: the field has one type, and no annotation
    that changes how tyro parses it."""
    is_read = flag.kinds[0] in (bool, int, float, str, Path) or flag.takes_several or bool(flag.choices)
    return len(flag.kinds) == 1 and is_read and all(map(_is_known, flag.notes))


def _is_known(note: Any) -> bool:
    """Return whether raytf supports an annotation: not tyro's, or positional, repeatable or a placeholder."""
    if not type(note).__module__.startswith("tyro") or note in (POSITIONAL, APPENDED):
        return True
    return getattr(note, "metavar", None) is not None and note == tyro.conf.arg(metavar=note.metavar)


# -- the page of --help ------------------------------------------------------------------------------------------------


def page(prog: str, groups: Sequence[FlagGroup], everything: bool, width: int) -> str:
    """Return the page of `--help`, which lists the common flags, or of `--help-all`, which lists all flags.

    Args:
        prog: the command.
        groups: from `of_command`: the command's own group first, then the groups of `raytf.Flags`.
        everything: whether to list all flags.
        width: columns of the terminal.
    """
    width = max(60, min(width, 110))
    own, *others = groups
    lines = [f"usage: {usage(prog, groups)}", ""]
    for paragraph in own.about.split("\n\n"):
        if paragraph.strip():
            lines += [*_filled(paragraph, width), ""]
    lines += _entries(own, own.flags, width)
    left_out = 0
    for group in others:
        shown = tuple(flag for flag in group.flags if everything or any(isinstance(n, Usual) for n in flag.notes))
        left_out += len(group.flags) - len(shown)
        if shown:
            title = " ".join(group.about.split()).partition(". ")[0].rstrip(".")
            lines += ["", f"{title}:", *_entries(group, shown, width)]
    lines += ["", *_entry("-h, --help", "show this page and exit", width)]
    if left_out:
        lines += _entry("--help-all", f"also show {left_out} more flags", width)
    return "\n".join(lines)


def usage(prog: str, groups: Sequence[FlagGroup]) -> str:
    """Return the usage line: the command, its positional arguments, and the place of its flags."""
    every = _all(groups)
    named = [flag.placeholder if flag.is_needed else f"[{flag.placeholder}]" for flag in every if flag.is_positional]
    has_flags = any(flag.flag_names for flag in every)
    rest = [note.text for flag in every for note in flag.notes if isinstance(note, Rest)]
    return " ".join([prog, *named, *(["[flags]"] if has_flags else []), *rest])


def _entries(group: FlagGroup, shown: Sequence[Setting], width: int) -> Iterator[str]:
    about = texts(group.kind)
    for flag in shown:
        left = flag.placeholder if flag.is_positional else f"{flag.flag} {flag.placeholder}"
        if flag.is_switch:
            left = flag.flag if flag.default is False else ", ".join(flag.flag_names)
        yield from _entry(left, f"{about.get(flag.name, '')}{_default(flag.default)}", width)


def _entry(left: str, text: str, width: int) -> Iterator[str]:
    lines = _filled(text, width - _LEFT) or [""]
    if len(left) + 4 > _LEFT:
        yield f"  {left}"
    else:
        yield f"  {left:<{_LEFT - 2}}{lines.pop(0)}".rstrip()
    for line in lines:
        yield f"{'':<{_LEFT}}{line}"


def _default(value: object) -> str:
    if value is None or value is dataclasses.MISSING or value is False or value in ("", ()):
        return ""
    return f" (default: {'on' if value is True else f'{value:g}' if isinstance(value, float) else value})"


def _filled(text: str, width: int) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def wrong(groups: Sequence[FlagGroup], args: Sequence[str]) -> str:
    """Return the first problem with the arguments of a command, as one line; empty if there is none."""
    known, every = by_name(groups), _all(groups)
    places = [flag for flag in every if flag.is_positional]
    several, filled, at = any(flag.takes_several for flag in places), 0, 0
    passed: set[str] = set()
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
            near = difflib.get_close_matches(name.lstrip("-"), [other.lstrip("-") for other in known], n=1)
            return f"{name}: unknown flag. {f'Did you mean --{near[0]}?' if near else '--help lists the flags.'}"
        passed.add(flag.name)
        values = [assigned] if equals else []
        while not equals and at < len(args) and not _is_name(args[at]) and _takes(flag, len(values), args[at]):
            values.append(args[at])
            at += 1
        problem = _wrong_values(flag, name, values)
        if problem:
            return problem
    needed = [flag.placeholder for flag in places if flag.is_needed][filled:]
    named = [flag for flag in every if not flag.is_positional and flag.is_needed and flag.name not in passed]
    needed += [f"{flag.flag} {flag.placeholder}" for flag in named]
    return f"expected {needed[0]}. See --help." if needed else ""


def _is_name(text: str) -> bool:
    return text.startswith("-") and text != "-" and not _is_of(text, float)  # a negative number is a value


def _takes(flag: Setting, count: int, text: str) -> bool:
    if flag.is_switch:
        return flag.default is None and text.lower() in _SWITCHED
    return count < len(flag.parts) if flag.parts else flag.takes_several or count == 0


def _wrong_values(flag: Setting, name: str, values: Sequence[str]) -> str:
    if flag.is_switch:
        return ""
    kind, choices, is_open = flag.kinds[0], flag.choices, flag.default is None
    expected = f"one of {', '.join(choices)}" if choices else _EXPECTED.get(kind, "")
    if not values:
        return f"{name}: expected {expected or 'a value'}, such as {name} {_example(flag)}."
    if is_open and values == ["None"]:
        return ""
    if flag.parts:
        is_right = len(values) == len(flag.parts) and all(map(_is_of, values, flag.parts))
        return "" if is_right else f"{' '.join([name, *values])}: expected {flag.placeholder}."
    for value in values:
        if choices and value not in choices:
            near = difflib.get_close_matches(value, choices, n=1)
            return f"{name} {value}: expected {expected}.{f' Did you mean {near[0]}?' if near else ''}"
        if kind in (int, float) and not _is_of(value, kind):
            return f"{name} {value}: expected {expected}."
    return ""


def _is_of(text: str, kind: type) -> bool:
    try:
        kind(text)
    except ValueError:
        return False
    return True


def _example(flag: Setting) -> str:
    if flag.choices:
        return flag.choices[0]
    if isinstance(flag.default, (int, float, str)) and str(flag.default):
        return f"{flag.default:g}" if isinstance(flag.default, float) else str(flag.default)
    return {int: "2", float: "0.5"}.get(flag.kinds[0], flag.placeholder)
