"""Facts about this machine, and checks that a name is safe to pass to ssh."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

#: Names that ssh cannot read as an option, nor a shell command in the user's ssh configuration (%h) as code.
_HOST = re.compile(r"[A-Za-z0-9_:\[][A-Za-z0-9._:%\[\]-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+\\-]*")
_TOOL_SECONDS = 15


@dataclass(frozen=True)
class Surroundings:
    """This machine.

    Attributes:
        python: the version of Python, such as 3.11.7; Ray requires the same patch level everywhere.
        ray: the version of the installed Ray.
        folder: the current folder, to which relative paths in the YAML refer, as in `ray up`.
        environ: the shell's environment.
    """

    python: str
    ray: str
    folder: Path
    environ: Mapping[str, str] = field(default_factory=dict)

    def local(self, path: str) -> Path:
        """Return the path on this machine for a path in the YAML."""
        home = self.environ.get("HOME", "~")
        return self.folder / (path.replace("~", home, 1) if path.startswith("~") else path)


def here() -> Surroundings:
    """Return the surroundings of this process."""
    return Surroundings(platform.python_version(), importlib.metadata.version("ray"), Path.cwd(), os.environ)


def package_file(package: str, name: str) -> Path | None:
    """Return the path of a file in an installed package, or None if it does not exist. The package is not imported."""
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # of a package that it is in
        return None
    paths = (Path(folder) / name for folder in (spec.submodule_search_locations or () if spec else ()))
    return next((path for path in paths if path.is_file()), None)


@cache
def ray_file(name: str) -> Any:
    """Return a JSON file of the installed Ray, such as `autoscaler/ray-schema.json`, without importing Ray (slow)."""
    path = package_file("ray", name)
    if path is None:
        raise FileNotFoundError(f"the installed Ray has no {name}")
    return json.loads(path.read_text(encoding="utf-8"))


def tool_output(command: list[str], environ: Mapping[str, str]) -> str:
    """Run a read-only command and return its output, or an empty string if it fails."""
    path = shutil.which(command[0], path=environ.get("PATH")) or command[0]
    try:
        done = subprocess.run(
            [path, *command[1:]],
            capture_output=True,
            text=True,
            timeout=_TOOL_SECONDS,
            check=False,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environ},
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def is_host(name: object) -> bool:
    """Return whether ssh and a shell can only interpret a string as the name or address of a host."""
    return _HOST.fullmatch(str(name)) is not None


def is_user(name: object) -> bool:
    """Return whether ssh and a shell can only interpret a string as the name of a user."""
    return _USER.fullmatch(str(name)) is not None
