"""What a check may know of this machine, passed in; and which names ssh may be given."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

#: What ssh takes for an option, or a shell of the user's own configuration (%h) for more than a name, is not a host.
_HOST = re.compile(r"[A-Za-z0-9_:\[][A-Za-z0-9._:%\[\]-]*")
_USER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+\\-]*")


@dataclass(frozen=True)
class Surroundings:
    """This machine.

    Attributes:
        python: its Python, such as 3.11.7; Ray wants the same patch level everywhere.
        ray: the version of the Ray that is installed.
        folder: what relative paths of the YAML start from: that of the shell, as `ray up` has it.
        environ: the shell's environment.
    """

    python: str
    ray: str
    folder: Path
    environ: Mapping[str, str] = field(default_factory=dict)

    def local(self, path: str) -> Path:
        """A path of the YAML as a file of this machine."""
        home = self.environ.get("HOME", "~")
        return self.folder / (path.replace("~", home, 1) if path.startswith("~") else path)


def here() -> Surroundings:
    """Those of this process."""
    return Surroundings(platform.python_version(), importlib.metadata.version("ray"), Path.cwd(), os.environ)


@cache
def ray_file(name: str) -> Any:
    """A JSON file of the installed Ray, read without importing it: that would take seconds.

    Args:
        name: such as `autoscaler/ray-schema.json`.
    """
    spec = importlib.util.find_spec("ray")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        path = Path(folder) / name
        if path.is_file():
            return json.loads(path.read_text(encoding="utf-8"))
    raise FileNotFoundError(f"the installed Ray has no {name}")


def is_host(name: object) -> bool:
    """Whether it may be an address or a host's name, and nothing else to ssh or a shell."""
    return _HOST.fullmatch(str(name)) is not None


def is_user(name: object) -> bool:
    """Whether it may be the name of a user, and nothing else to ssh or a shell."""
    return _USER.fullmatch(str(name)) is not None
