"""The page of `--help`: the flags that a person uses first; `--help-all` has all of them."""

from __future__ import annotations

import dataclasses
import inspect
import textwrap
from collections.abc import Iterator, Sequence

from raytf.config import flags
from raytf.config.flags import Flag, FlagGroup
from raytf.config.setting import Rest, Usual

_LEFT = 30
_ALL = "--help-all"
_HELP = ("-h, --help", "show this page and exit")


def page(prog: str, groups: Sequence[FlagGroup], everything: bool, width: int) -> str:
    """Return the page.

    Args:
        prog: the command.
        groups: of `flags.of_command`; the first one is the command's own, those of `raytf.Flags` follow.
        everything: whether flags are listed that few people use.
        width: columns of the terminal.
    """
    width = max(60, min(width, 110))
    own, *others = groups
    lines = [f"usage: {usage(prog, groups)}", "", *_about(_doc(own), width)]
    lines += _entries("", own, own.flags, width)
    left_out = 0
    for group in others:
        shown = group.flags if everything else tuple(flag for flag in group.flags if _is_usual(flag))
        left_out += len(group.flags) - len(shown)
        if shown:
            lines += _entries(_title(_doc(group)), group, shown, width)
    lines += ["", *_entry(*_HELP, width)]
    if left_out:
        lines += _entry(_ALL, f"show {left_out} more flags, too", width)
    return "\n".join(lines)


def _doc(group: FlagGroup) -> str:
    return inspect.getdoc(group.kind) or ""


def _title(about: str) -> str:
    """Return the first sentence of a docstring."""
    return " ".join(about.split()).partition(". ")[0].rstrip(".")


def _is_usual(flag: Flag) -> bool:
    return any(isinstance(note, Usual) for note in flag.setting.notes)


def usage(prog: str, groups: Sequence[FlagGroup]) -> str:
    """Return the command with its values and the place of its flags."""
    places = [flag for group in groups for flag in group.flags if flag.is_positional]
    named = [flag.value if flag.is_needed else f"[{flag.value}]" for flag in places]
    has_flags = any(flag.names for group in groups for flag in group.flags)
    rest = [
        note.text for group in groups for flag in group.flags for note in flag.setting.notes if isinstance(note, Rest)
    ]
    return " ".join([prog, *named, *(["[flags]"] if has_flags else []), *rest])


def _about(text: str, width: int) -> Iterator[str]:
    for paragraph in text.split("\n\n"):
        if paragraph.strip():
            yield from _filled(paragraph, width)
            yield ""


def _entries(title: str, group: FlagGroup, shown: Sequence[Flag], width: int) -> Iterator[str]:
    texts = flags.texts(group.kind)
    if title:
        yield ""
        yield f"{title}:"
    for flag in shown:
        yield from _entry(_left(flag), f"{texts.get(flag.setting.name, '')}{_default(flag)}", width)


def _entry(left: str, text: str, width: int) -> Iterator[str]:
    lines = _filled(text, width - _LEFT) or [""]
    if len(left) + 4 > _LEFT:
        yield f"  {left}"
    else:
        yield f"  {left:<{_LEFT - 2}}{lines.pop(0)}".rstrip()
    for line in lines:
        yield f"{'':<{_LEFT}}{line}"


def _left(flag: Flag) -> str:
    if flag.is_positional:
        return flag.value
    its = flag.setting
    if not flag.is_switch:
        return f"{its.flag} {flag.value}"
    return its.flag if its.default is False else ", ".join(flag.names)


def _default(flag: Flag) -> str:
    value = flag.setting.default
    if value is None or value is dataclasses.MISSING or value is False or value in ("", ()):
        return ""
    return f" (default: {'on' if value is True else _short(value)})"


def _short(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _filled(text: str, width: int) -> list[str]:
    return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)
