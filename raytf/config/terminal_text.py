"""Prints untrusted text, such as names, values and errors, without any effect on the terminal.

Otherwise an escape sequence in a run's name could set the window's title, a line feed could forge a row of a table, a
direction mark could reverse a path, and half a surrogate pair could crash the command.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from typing import TextIO

#: Control characters, direction marks and other zero-width characters, surrogates, line and paragraph separators.
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
#: Escape sequences: with parameters, with a text up to a bell or another sequence, and short ones.
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[PX\]^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]")
_CONTROL, _NOT_PLAIN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"), re.compile(r"[^\n\t -~]")


def visible(text: object, lines: bool = False) -> str:
    r"""Return a text as one line, with characters that control a terminal escaped as in Python: `\x1b`.

    Args:
        text: any object; its `str` is shown.
        lines: keep line feeds and tabs, for a text of several lines.
    """
    shown = str(text)
    if shown.isascii() and shown.isprintable():
        return shown
    return "".join(c if not _is_hidden(c) or (lines and c in "\n\t") else _written(c) for c in shown)


def log_text(text: str) -> str:
    """Return a program's output without the characters that control a terminal.

    Escape sequences, including those for colors, and control characters are removed; a carriage return starts a new
    line. Direction marks and similar characters are escaped as by `visible`.
    """
    text = _SEQUENCE.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _NOT_PLAIN.sub(lambda match: visible(match[0]), _CONTROL.sub("", text))


def say(text: object = "", file: TextIO | None = None, lines: bool = False) -> None:
    """Print a line that may contain untrusted text; see `visible`."""
    print(visible(text, lines), file=file or sys.stdout, flush=True)


def printable() -> None:
    """Make standard output and error accept every character, even if their encoding lacks it."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # a notebook's streams have no such method
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _is_hidden(char: str) -> bool:
    return unicodedata.category(char) in _HIDDEN


def _written(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
