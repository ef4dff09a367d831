"""A working directory, packed once: what is submitted again is what was submitted, whatever was edited meanwhile."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from raytf.cluster.check import local_environment, local_files
from raytf.cluster.check.finding import Severity
from raytf.errors import ConfigError

#: What Ray's job server takes in one request.
MOST_BYTES = 100 << 20


def pack(folder: str, into: Path) -> Path:
    """Pack a folder as `ray job submit` does: without .git, and what .gitignore and .rayignore name.

    Args:
        into: a folder for the package.

    Raises:
        ConfigError: there is no such folder, or too much is in it.
    """
    for found in local_files.working_dir(folder, local_environment.here()):
        if found.severity is Severity.ERROR:
            raise ConfigError(f"{found.what}. {found.fix}")
    return _zip(folder, into, MOST_BYTES)


def _zip(folder: str, into: Path, most: int) -> Path:
    from raytf._ray import jobs

    path = into / "working_dir.zip"
    quiet = logging.getLogger("raytf.package")
    quiet.setLevel(logging.ERROR)
    git = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    try:
        jobs.pack(os.path.expanduser(folder), path, git, quiet)
    except OSError as error:
        raise ConfigError(f"--working-dir {folder} cannot be packed: {error}.") from None
    size = path.stat().st_size
    if size > most:
        raise ConfigError(
            f"--working-dir {folder} makes a package of {size >> 20} MiB, and Ray's job server takes {most >> 20} MiB. "
            "Name what is not needed in .rayignore or .gitignore; training data belongs into the bucket."
        )
    return path
