"""Text from outside on a terminal: names, values and errors of others are shown as they are and have no effect.

An escape sequence in a run's name would set the window's title, a line feed forge a row of a table, a mark of direction
turn a path around, and half a surrogate pair end the command that prints it.
"""

from __future__ import annotations

import re
import sys
import unicodedata
from typing import TextIO

#: Control characters, marks without a width and of direction, halves of pairs, separators of lines and paragraphs.
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
#: Escape sequences: with parameters, with a text that ends with a bell or another sequence, and short ones.
_SEQUENCE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[PX\]^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|\x1b[ -/]*[0-~]")
_CONTROL, _NOT_PLAIN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]"), re.compile(r"[^\n\t -~]")


def visible(text: object, lines: bool = False) -> str:
    r"""Return a text as one line in which characters that a terminal acts on are written as in Python: `\x1b`.

    Args:
        text: anything; its `str`.
        lines: keep line feeds and tabs, where several lines are meant.
    """
    shown = str(text)
    if shown.isascii() and shown.isprintable():
        return shown
    return "".join(c if not _is_hidden(c) or (lines and c in "\n\t") else _written(c) for c in shown)


def log_text(text: str) -> str:
    """Return a program's output without what a terminal would act upon.

    Escape sequences, those for colors too, and control characters are removed; a carriage return begins a line. Marks
    of direction and the like are shown as by `visible`.
    """
    text = _SEQUENCE.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _NOT_PLAIN.sub(lambda match: visible(match[0]), _CONTROL.sub("", text))


def say(text: object = "", file: TextIO | None = None, lines: bool = False) -> None:
    """Print a line that holds what came from outside; see `visible`."""
    print(visible(text, lines), file=file or sys.stdout, flush=True)


def printable() -> None:
    """Let standard output and error take every character, also where their encoding has none for it."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)  # a notebook's has none
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")


def _is_hidden(char: str) -> bool:
    return unicodedata.category(char) in _HIDDEN


def _written(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")
