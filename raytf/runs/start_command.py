"""The command that started a run, kept in its folder: who computes a step again runs the same program again."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path

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


def is_program(command: StartCommand) -> bool:
    """Whether a command names a program, a file or raytf's own command, and no Python code or any module."""
    words = [word for word in command.words if word not in ("-u", "-B")][:1]
    return bool(words) and not words[0].startswith("-") and (words[0].endswith(".py") or Path(words[0]).name == "raytf")


def here(command: StartCommand) -> list[str]:
    """The command for this machine, whose interpreter and scripts may be in other places."""
    words = list(command.words)
    for place, word in enumerate(words):
        if not word.startswith("-"):
            # A console script, such as `raytf`, lies beside the interpreter.
            script = Path(sys.executable).with_name(Path(word).name)
            if not os.path.exists(word) and script.exists():
                words[place] = str(script)
            break
    return [sys.executable, *words]
