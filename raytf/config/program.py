"""The program that trains: the name that its runs have by default, its file, and what to type to continue a run."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

#: Names of runs whose program has none, such as `python -c`, and of notebooks whose file is unknown.
NO_NAME, NOTEBOOK = "run", "notebook"
_NOTEBOOK_SUFFIX = ".ipynb"
#: Folders of modules that are installed, such as pytest. Their names say nothing about the run.
_INSTALLED = {"site-packages", "dist-packages"}
_SAME = "the same command"
#: The text that continues each new run of this process, and the text that it replaces.
_replacements: list[tuple[str, str]] = []
#: Ray copies a job's working directory below a folder of this name, anew for each version of its files.
_COPIED = "runtime_resources"


@dataclass(frozen=True)
class Program:
    """The name of a program's runs, where nobody names them, and the path of its file, without links; empty where it
    has none, or where that is a temporary copy."""

    name: str
    path: str = ""


def of_file(path: str) -> Program:
    """Return the program that a file contains."""
    return Program(name_of(path), lasting(os.path.realpath(path)))


def of_process(in_notebook: bool) -> Program:
    """Return the program that this process runs."""
    main = sys.modules["__main__"]
    files = [sys.argv[0], getattr(main, "__file__", None) or ""]
    if in_notebook:  # the first name is that of VS Code, the second that of Jupyter
        files = [getattr(main, "__vsc_ipynb_file__", ""), os.environ.get("JPY_SESSION_NAME", "")]
    return choose(files, in_notebook)


def choose(files: list[str], in_notebook: bool) -> Program:
    """Return the program of a process."""
    if in_notebook:
        path = next((file for file in files if _NOTEBOOK_SUFFIX in file), "")
        # VS Code appends an id to the name that it gives to Jupyter.
        name = name_of(path.rpartition(_NOTEBOOK_SUFFIX)[0]) if path else NOTEBOOK
        return Program(name, lasting(os.path.realpath(path)) if os.path.isabs(path) else "")
    path = next((file for file in files if os.path.exists(file)), "")
    return of_file(path) if path else Program(NO_NAME)


def name_of(path: str) -> str:
    """Return the name that the runs of a file have by default."""
    file = Path(path)
    if _INSTALLED & set(file.parts):
        return NO_NAME
    stem = file.parent.name if file.name == "__main__.py" else file.name.removesuffix(file.suffix)
    return "".join(c if c.isalnum() or c in "-_." else "-" for c in stem).lstrip(".") or NO_NAME


def lasting(path: str) -> str:
    """Return a program's path, or nothing where the next start of the same program may have another one."""
    return "" if {_COPIED, *_INSTALLED} & set(Path(path).parts) or not os.path.exists(path) else path


# -- continuing --------------------------------------------------------------------------------------------------------
#
# A run continues by the same command, unless that started a new run.


def replace_new(new: str, name: str) -> None:
    """Note that `new`, which was typed, has started a run, and that `name`, such as `--run mnist-2`, continues it."""
    _replacements.append((new, name))


def next_command() -> str:
    """Return the command that continues the run of this process, as the subject of a sentence."""
    return f"{_SAME}{change()}"


def change() -> str:
    """Return what to change in the command or cell that started a new run, between commas; empty for no new run."""
    if not _replacements:
        return ""
    new, name = _replacements[-1]
    return f", with {name} in place of {new},"


def from_last_checkpoint() -> str:
    """Return how to continue the run of this process, as a sentence without a capital letter and a period."""
    return f"{next_command()} continues from the last checkpoint"


def next_submission(command: str) -> str:
    """Return the command that continues the run of a submitted job, as the subject of a sentence."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    return f"{_SAME}, with --run and the name that the job printed in place of --new," if "--new" in words else _SAME
