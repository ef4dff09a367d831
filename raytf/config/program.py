"""The program that trains: the name that its runs have by default, and its file."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

#: Names of runs whose program has none, such as `python -c`, and of notebooks whose file is unknown.
NO_NAME, NOTEBOOK = "run", "notebook"
_NOTEBOOK_SUFFIX = ".ipynb"
#: Folders of modules that are installed, such as pytest. Their names say nothing about the run.
_INSTALLED = {"site-packages", "dist-packages"}
#: Ray copies a job's working directory below a folder of this name, anew for each version of its files.
_COPIED = "runtime_resources"


@dataclass(frozen=True)
class Program:
    """A program.

    Attributes:
        name: of its runs, where nobody names them.
        path: of its file, without links; empty where it has none, or where that is a temporary copy.
    """

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
    """Return the program of a process.

    Args:
        files: paths that the process may have been started with, the best one first.
        in_notebook: whether it is the kernel of a notebook.
    """
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
