"""The annotations of a setting: its bounds, whether it belongs to the run's identity, which strategies accept it, and
its role in a search.

All of this is in the field's `Annotated[...]`; no other list of settings exists. Bounds are those of `annotated_types`
(`Ge(1)`), choices are the field's `Literal`, and the type `int` requires a whole number.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import operator
import os
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import annotated_types
import tyro

from raytf.errors import ConfigError, one_line

#: The annotations of a positional argument, and of a flag that may be repeated.
POSITIONAL = typing.get_args(tyro.conf.Positional[str])[1]
APPENDED = typing.get_args(tyro.conf.UseAppendAction[str])[1]
#: The placeholder for a value in the usage line.
_PLACEHOLDERS = {int: "N", float: "X", str: "TEXT"}
#: The types that a program may pass, for messages.
_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a string", os.PathLike: "a path"}
#: Kind of bound -> its attribute, the comparison of a value with it, and the text for people.
_BOUNDS: dict[type, tuple[str, Callable[[Any, Any], Any], str]] = {
    annotated_types.Ge: ("ge", operator.ge, "a number, {} or more"),
    annotated_types.Gt: ("gt", operator.gt, "a number above {}"),
    annotated_types.Le: ("le", operator.le, "at most {}"),
    annotated_types.Lt: ("lt", operator.lt, "a number below {}"),
}


class When(enum.Enum):
    """The runs whose results depend on a setting."""

    ALWAYS = "always"
    CHANGED = "where it is not the default"  # runs that are older than the setting do not have it
    EXACT = "with `--exact`"
    WITH_SERVERS = "with parameter servers"  # synchronous strategies learn the same, so a run may change between them


@dataclass(frozen=True)
class Identity:
    """The setting must not change when a run is resumed.

    Attributes:
        when: the runs for which this is true.
        text: the format of its value in the run's checkpoints; it can name any setting.
        within: the name of another setting, whose text includes this one.
    """

    when: When = When.ALWAYS
    text: str | None = None
    within: str | None = None


@dataclass(frozen=True)
class Refused:
    """Some strategies refuse the setting.

    Attributes:
        by: the strategies.
        message: for people; may contain {typed} (flag and value), {flag} and {strategy}.
        unless: values that are accepted nevertheless, in addition to the default.
        sync_replicas: if not None, only parameter servers with (True) or without (False) `--sync-replicas` refuse it.
    """

    by: tuple[str, ...]
    message: str
    unless: tuple[Any, ...] = ()
    sync_replicas: bool | None = None


@dataclass(frozen=True)
class Expected:
    """The message for a number outside its bounds, instead of the text of the bounds."""

    text: str


@dataclass(frozen=True)
class AlsoTakes:
    """A program can pass another type instead of a string: `workers=2`, `storage=Path("runs")`.

    Attributes:
        kind: int or os.PathLike.
    """

    kind: type


@dataclass(frozen=True)
class Rest:
    """The value can also be the end of the command line, without the flag.

    Attributes:
        text: its placeholder in the usage line.
    """

    text: str


@dataclass(frozen=True)
class Usual:
    """The setting is a common one: `--help` lists it, not only `--help-all`."""


class InSearch(enum.Enum):
    """The role of a setting in `raytf tune`. A setting without a role that is not in the identity can differ when a
    search is continued."""

    OWNED = "each trial has its own value, which `raytf tune` sets"
    NEEDED = "a job must have it so that its trials can run side by side"
    SIZES = "if it is searched, each trial has the workers that its value needs"
    KEPT = "a command that continues a search must pass the same value"


@dataclass(frozen=True)
class Setting:
    """One setting, read from its field: type without annotations, default (None if it is open), and annotations."""

    name: str
    kind: Any
    default: Any
    notes: tuple[Any, ...] = ()

    @property
    def flag(self) -> str:
        return flag(self.name)

    @property
    def flag_names(self) -> tuple[str, ...]:
        """The names of its flag on a command line; empty for a positional argument."""
        if self.is_positional:
            return ()
        return (self.flag, f"--no-{self.flag[2:]}") if self.is_switch else (self.flag,)

    @property
    def is_positional(self) -> bool:
        """Whether it is a positional argument."""
        return POSITIONAL in self.notes

    @property
    def is_switch(self) -> bool:
        """Whether its flag takes no value."""
        return self.kinds == (bool,)

    @property
    def is_needed(self) -> bool:
        """Whether the command requires it."""
        return self.default is dataclasses.MISSING

    @property
    def takes_several(self) -> bool:
        return typing.get_origin(self.kinds[0]) in (tuple, list)

    @property
    def parts(self) -> tuple[type, ...]:
        """The types of its values, if its flag takes a fixed number of them."""
        inner = typing.get_args(self.kinds[0]) if self.takes_several else ()
        return () if typing.get_origin(self.kinds[0]) is list or ... in inner else inner

    @property
    def placeholder(self) -> str:
        """The placeholder for its value in a usage line."""
        own = next((note.metavar for note in self.notes if getattr(note, "metavar", None)), None)
        if own:
            return str(own)
        if self.is_positional:
            return self.name.upper() + ("..." if self.takes_several else "")
        if self.choices:
            return "|".join(self.choices)
        return " ".join(_PLACEHOLDERS.get(kind, "TEXT") for kind in self.parts or self.kinds[:1])

    @property
    def identity(self) -> Identity | None:
        return next((note for note in self.notes if isinstance(note, Identity)), None)

    @property
    def refusals(self) -> list[Refused]:
        return [note for note in self.notes if isinstance(note, Refused)]

    @property
    def in_search(self) -> frozenset[InSearch]:
        return frozenset(note for note in self.notes if isinstance(note, InSearch))

    @property
    def bounds(self) -> list[annotated_types.BaseMetadata]:
        """The bounds, each a `Ge`, `Gt`, `Le` or `Lt`."""
        return [bound for note in self.notes for bound in _bounds(note)]

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The types that a value can have, without None."""
        is_union = isinstance(self.kind, types.UnionType) or typing.get_origin(self.kind) is typing.Union
        parts = typing.get_args(self.kind) if is_union else (self.kind,)
        return tuple(part for part in parts if part is not type(None))

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed words; empty for a setting that is not a choice."""
        return tuple(
            str(word) for part in self.kinds if typing.get_origin(part) is Literal for word in typing.get_args(part)
        )

    @property
    def python_kinds(self) -> tuple[type, ...]:
        """The types that a program can pass, without None; a choice is a string."""
        own: type = str if self.choices else self.kinds[0]
        return (own, *(note.kind for note in self.notes if isinstance(note, AlsoTakes)))

    @property
    def is_fixed_in_search(self) -> bool:
        """Whether a command that continues a search must pass the same value. Settings that belong to the identity only
        with parameter servers are compared separately."""
        counts = self.identity is not None and self.identity.when is not When.WITH_SERVERS
        return counts or InSearch.KEPT in self.in_search

    def typed(self, value: Any) -> str:
        """Return the flag with a value, as the user types it."""
        if isinstance(value, bool):
            return self.flag if value else f"--no-{self.flag[2:]}"
        return f"{self.flag} {value:g}" if isinstance(value, float) else f"{self.flag} {value}"

    def from_python(self, value: Any, argument: str = "") -> Any:
        """Convert a value that a program passed to the value that the flag would have. `argument` is the name in
        errors, by default that of the setting."""
        if value is None and self.default is None:
            return None
        typed = f"{argument or self.name}={one_line(repr(value), 100)}"
        for kind in self.python_kinds:
            try:
                plain = _as(kind, value)
            except (TypeError, ValueError, OverflowError):
                continue
            converted = plain if kind is self.python_kinds[0] else str(plain)
            self.check(converted, typed)
            return converted
        choices = f"one of {', '.join(self.choices)}" if self.choices else ""
        expected = choices or " or ".join(_WORDS[kind] for kind in self.python_kinds)
        raise ConfigError(f"{typed}: expected {expected}.")

    def check(self, value: Any, typed: str = "") -> None:
        """Raise a ConfigError if a value is not allowed. `typed` is the text that the user typed, by default the flag
        and the value."""
        if value is None:
            return
        typed = typed or f"{self.flag} {value}"
        if self.choices and str(value) not in self.choices:
            raise ConfigError(f"{typed}: expected one of {', '.join(self.choices)}.")
        for bound in self.bounds:
            if isinstance(value, str) or not _holds(bound, value):
                own = next((note.text for note in self.notes if isinstance(note, Expected)), None)
                raise ConfigError(f"{typed}: expected {own or words(bound)}.")
        if self.kinds == (int,) and (isinstance(value, str) or abs(value) == float("inf") or value != int(value)):
            raise ConfigError(f"{typed}: expected a whole number.")


def flag(name: str) -> str:
    """Return a setting's flag."""
    return f"--{name.replace('_', '-')}"


@functools.cache
def of(section: type) -> tuple[Setting, ...]:
    """Return the settings of a section, in the order of its fields."""
    hints = typing.get_type_hints(section, include_extras=True)
    settings = []
    for field in dataclasses.fields(section):
        hint = hints[field.name]
        is_annotated = typing.get_origin(hint) is Annotated
        kind, *notes = typing.get_args(hint) if is_annotated else (hint,)
        settings.append(Setting(field.name, kind, field.default, tuple(notes)))
    return tuple(settings)


def plain(hint: Any) -> Any:
    """Return a type without its annotations."""
    return typing.get_args(hint)[0] if typing.get_origin(hint) is Annotated else hint


def values(section: Any) -> Iterator[tuple[Setting, Any]]:
    """Return the settings of a section, each with its value."""
    kind: type = type(section)
    return ((setting, getattr(section, setting.name)) for setting in of(kind))


def check(section: Any) -> None:
    """Raise a ConfigError if a setting of a section has a value that is not allowed."""
    for setting, value in values(section):
        setting.check(value)


def words(bound: annotated_types.BaseMetadata) -> str:
    """Return the text of a bound for people, such as `a number above 0`."""
    if type(bound) not in _BOUNDS:
        raise TypeError(f"{bound!r} is not a bound that settings have")
    name, _, text = _BOUNDS[type(bound)]
    limit = getattr(bound, name)
    return "a finite number" if (name, limit) == ("lt", float("inf")) else text.format(limit)


def _bounds(note: Any) -> list[annotated_types.BaseMetadata]:
    if isinstance(note, annotated_types.GroupedMetadata):
        return [bound for part in note for bound in _bounds(part)]
    return [note] if type(note) in _BOUNDS else []


def _holds(bound: annotated_types.BaseMetadata, value: Any) -> bool:
    name, compare, _ = _BOUNDS[type(bound)]
    return bool(compare(value, getattr(bound, name)))


def _as(kind: type, value: Any) -> Any:
    """Convert a value of NumPy or another library to a plain type; raise if the value has another type."""
    if kind is os.PathLike:
        return os.fspath(value)
    is_switch = type(value).__name__ in ("bool", "bool_")  # bool_ is NumPy's
    if isinstance(value, str) is not (kind is str) or is_switch is not (kind is bool):
        raise TypeError
    plain = kind(value)
    if kind is int and plain != value:
        raise ValueError
    return plain
