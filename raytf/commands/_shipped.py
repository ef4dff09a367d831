"""The files that are released with the package: example jobs, configurations of clusters, and tested versions."""

from __future__ import annotations

import ast
import importlib.metadata
from pathlib import Path

import raytf
from raytf.errors import DISTRIBUTION, ConfigError

#: Where the code and its documentation are; pyproject.toml says the same.
REPOSITORY = "https://github.com/raytf/raytf"


def folder() -> Path:
    """Return the folder that holds `jobs/`, `cluster-configs/` and `constraints.txt`: a checkout, or where pip put
    them.

    Raises:
        ConfigError: they are not there; says what to type.
    """
    checkout = Path(raytf.__file__).parents[1]
    if all((checkout / name).is_dir() for name in ("jobs", "cluster-configs")):
        return checkout
    try:
        files = importlib.metadata.files(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.parts[-4:] == ("share", "raytf", "jobs", "mnist.py"):
            return Path(str(file.locate())).resolve().parents[1]
    raise ConfigError(
        f"the examples were not installed with this package. Type: pip install --force-reinstall {DISTRIBUTION}"
    )


def files(shipped: Path) -> list[Path]:
    """Return the files of that folder which belong to the package."""
    patterns = ("constraints*.txt", "jobs/*.py", "cluster-configs/*.yaml", "cluster-configs/iam/*.json")
    return [file for pattern in patterns for file in sorted(shipped.glob(pattern))]


def jobs(shipped: Path) -> dict[str, str]:
    """Return the example jobs in that folder: name -> what it does, the first line of its file."""
    files = sorted((shipped / "jobs").glob("*.py"))
    return {file.stem: summary(file.read_text(encoding="utf-8")) for file in files}


def summary(page: str) -> str:
    """Return what an example does: the first line of its docstring."""
    return (ast.get_docstring(ast.parse(page)) or "").partition("\n")[0]


def clusters(shipped: Path) -> list[str]:
    """Return the names of the configurations for `ray up` in that folder."""
    return sorted(file.stem for file in (shipped / "cluster-configs").glob("*.yaml"))
