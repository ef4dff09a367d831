"""Where YAML comes from: files, folders of them, kustomizations and standard input."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from raytf.errors import ConfigError, one_line

_KUSTOMIZATION = "kustomization.yaml"
#: Building one takes a tenth of a second; one with a remote base waits for the network.
_BUILD_SECONDS = 30


def read(names: Sequence[str]) -> dict[str, str]:
    """The text of each source, by name.

    Args:
        names: files; folders, which stand for all YAML in them; kustomizations, which are built; `-`.

    Raises:
        ConfigError: one of them is not there, or cannot be read or built.
    """
    texts: dict[str, str] = {}
    for name in names:
        if name == "-":
            texts["(standard input)"] = sys.stdin.read()
            continue
        path = Path(name).expanduser()
        found = dict(_folder(path)) if path.is_dir() else {name: _text(path)}
        if not found:
            raise ConfigError(f"{name} holds no .yaml file. Expected a cluster YAML, or a folder of them.")
        texts |= found
    return texts


def _folder(folder: Path) -> Iterator[tuple[str, str]]:
    if (folder / _KUSTOMIZATION).is_file():
        yield str(folder), _build(folder)
        return
    for path in sorted(folder.iterdir()):
        if path.is_dir() and not path.name.startswith("."):
            yield from _folder(path)
        elif path.suffix in (".yaml", ".yml"):
            yield str(path), _text(path)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {one_line(error)}. Expected a YAML file.") from None


def _build(folder: Path) -> str:
    """What a kustomization comes to; line numbers are those of that."""
    tool = shutil.which("kubectl")
    if tool is None:
        raise ConfigError(
            f"{folder} is a kustomization, and there is no kubectl to build it. Install kubectl, or build it elsewhere "
            "and give it as `raytf check -`."
        )
    try:
        done = subprocess.run(
            [tool, "kustomize", str(folder)], capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{folder}: kubectl kustomize took more than {_BUILD_SECONDS} s.") from None
    if done.returncode:
        raise ConfigError(f"{folder}: kubectl kustomize fails: {one_line(done.stderr, 300)}")
    return done.stdout
