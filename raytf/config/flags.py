"""The flags that a command takes: the fields of its dataclass, and of those inside it."""

from __future__ import annotations

import ast
import dataclasses
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
from raytf.config.setting import Setting

#: What tyro writes beside a field that has no flag, but a place.
_POSITIONAL = typing.get_args(tyro.conf.Positional[str])[1]
_APPEND = typing.get_args(tyro.conf.UseAppendAction[str])[1]
_OF_KINDS = {int: "N", float: "X", str: "TEXT"}


@dataclass(frozen=True)
class Flag:
    """A flag, or a value that has a place in the command and no name.

    Attributes:
        setting: its name, type and default.
    """

    setting: Setting

    @property
    def is_positional(self) -> bool:
        return _POSITIONAL in self.setting.notes

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        return self.setting.kinds == (bool,)

    @property
    def takes_several(self) -> bool:
        return typing.get_origin(self.setting.kinds[0]) in (tuple, list)

    @property
    def parts(self) -> tuple[type, ...]:
        """The types of its values, if it takes a fixed number of them."""
        inner = typing.get_args(self.setting.kinds[0]) if self.takes_several else ()
        return () if typing.get_origin(self.setting.kinds[0]) is list or ... in inner else inner

    @property
    def is_needed(self) -> bool:
        """Whether the command requires it."""
        return self.setting.default is dataclasses.MISSING

    @property
    def names(self) -> tuple[str, ...]:
        """The names under which it can be passed."""
        if self.is_positional:
            return ()
        its = self.setting.flag
        return (its, f"--no-{its[2:]}") if self.is_switch else (its,)

    @property
    def value(self) -> str:
        """The placeholder for its value in a text."""
        own = next((note.metavar for note in self.setting.notes if getattr(note, "metavar", None)), None)
        if own:
            return str(own)
        if self.is_positional:
            return self.setting.name.upper() + ("..." if self.takes_several else "")
        if self.setting.choices:
            return "|".join(self.setting.choices)
        return " ".join(_OF_KINDS.get(kind, "TEXT") for kind in self.parts or self.setting.kinds[:1])


@dataclass(frozen=True)
class FlagGroup:
    """The flags of one dataclass.

    Attributes:
        kind: the dataclass, whose source is read only where somebody asks for help.
        flags: without those of the dataclasses inside it.
    """

    kind: type
    flags: tuple[Flag, ...]


def of_command(main: Callable[[Any], object]) -> list[FlagGroup]:
    """Return the flags of a command, those of its own dataclass first.

    Args:
        main: a function with one argument.

    Returns:
        Empty where the argument is no dataclass, as where a command has subcommands, and where a flag is of a kind that
        only tyro knows.
    """
    hints = typing.get_type_hints(inspect.unwrap(main), include_extras=True)
    hints.pop("return", None)
    kind = setting.plain(next(iter(hints.values()), None))
    if len(hints) != 1 or not dataclasses.is_dataclass(kind):
        return []
    groups = list(_groups(kind)) or [FlagGroup(typing.cast(type, kind), ())]
    return groups if all(_is_plain(flag) for group in groups for flag in group.flags) else []


def texts(section: type) -> dict[str, str]:
    """Return the text below each field of a dataclass, inherited fields first; empty if its source cannot be read."""
    by_field: dict[str, str] = {}
    for kind in reversed(section.__mro__[:-1]):
        try:
            [tree] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        except (OSError, TypeError):  # of a program that was not read from a file
            continue
        body = typing.cast(ast.ClassDef, tree).body
        for field, text in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                by_field[typing.cast(ast.Name, field.target).id] = " ".join(str(text.value.value).split())
    return by_field


def by_name(groups: Sequence[FlagGroup]) -> dict[str, Flag]:
    """Return the flags by each name under which they can be passed."""
    return {name: flag for group in groups for flag in group.flags for name in flag.names}


def _groups(kind: Any) -> Iterator[FlagGroup]:
    own, inner = [], []
    for its in setting.of(kind):
        if dataclasses.is_dataclass(its.kind):
            inner.append(its.kind)
        else:
            own.append(Flag(its))
    if own:
        yield FlagGroup(kind, tuple(own))
    for section in inner:
        yield from _groups(section)


def _is_plain(flag: Flag) -> bool:
    """Return whether a flag is named and read as its field says: it has one type, and nothing that changes how tyro
    reads it."""
    kinds, choices = flag.setting.kinds, flag.setting.choices
    is_read = kinds[0] in (bool, int, float, str, Path) or flag.takes_several or bool(choices)
    return len(kinds) == 1 and is_read and all(map(_is_known, flag.setting.notes))


def _is_known(note: Any) -> bool:
    """Return whether a note is not tyro's, or one that raytf knows: a place, a repeated flag, a placeholder."""
    if not type(note).__module__.startswith("tyro") or note in (_POSITIONAL, _APPEND):
        return True
    return getattr(note, "metavar", None) is not None and note == tyro.conf.arg(metavar=note.metavar)
