"""The command that started a run, recorded in its folder for people to read.

A run's folder is data: whoever can write to it could name any program there. So nothing runs what it records.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from raytf.config.terminal_text import visible
from raytf.storage import untrusted_json
from raytf.storage.storage import Storage

FILE = "command.json"
_SHAPE = untrusted_json.record({"words": untrusted_json.each(untrusted_json.text), "folder": untrusted_json.text})


@dataclass(frozen=True)
class StartCommand:
    """How a Python process was started.

    Attributes:
        words: what follows the interpreter.
        folder: in which it ran.
    """

    words: tuple[str, ...]
    folder: str


def of_process() -> StartCommand | None:
    """That of this process; None for a notebook or an interactive interpreter, which have no program."""
    words = sys.orig_argv[1:]
    if "ipykernel" in sys.modules or not words or not sys.argv[0]:
        return None
    return StartCommand(tuple(words), os.getcwd())


def write(run: Storage, command: StartCommand | None) -> None:
    """Keep a command in a run's folder; the latest start of the run counts.

    Raises:
        StorageError: storage refuses.
    """
    if command is not None:
        run.put(FILE, json.dumps({"words": command.words, "folder": command.folder}).encode())


def read(run: Storage) -> StartCommand | None:
    """The command of a run; None where its folder has none.

    Raises:
        DamagedFileError: it cannot be read.
        StorageError: storage refuses.
    """
    found = untrusted_json.read(run, FILE, _SHAPE)
    return None if found is None else StartCommand(tuple(found["words"]), found["folder"])


def text(command: StartCommand) -> str:
    """Return a command as a line for a shell, safe to show on a terminal."""
    words = list(command.words)
    is_raytf = bool(words) and Path(words[0]).name == "raytf"
    return visible(shlex.join(["raytf", *words[1:]] if is_raytf else ["python", *words]))
