"""Where YAML comes from: files, folders of them, kustomizations and standard input."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from raytf.cluster.check.finding import Finding, error
from raytf.errors import ConfigError, one_line

_KUSTOMIZATION = "kustomization.yaml"
#: Building one takes a tenth of a second; one with a remote base waits for the network.
_BUILD_SECONDS = 30


def read(names: Sequence[str], unread: dict[str, str] | None = None) -> dict[str, str]:
    """The text of each source, by name.

    Args:
        names: files; folders, which stand for all YAML in them; kustomizations, which are built; `-`.
        unread: gets what cannot be read or built of a folder that holds more, with why; None to end there.

    Raises:
        ConfigError: one of them is not there, or cannot be read or built.
    """
    texts: dict[str, str] = {}
    for name in names:
        if name == "-":
            texts["(standard input)"] = _decoded("standard input", sys.stdin.buffer.read)
            continue
        path = Path(name).expanduser()
        before = len(unread or ())
        alone = not path.is_dir() or (path / _KUSTOMIZATION).is_file()
        found = dict(_folder(path, None if alone else unread)) if path.is_dir() else {name: _text(path)}
        if not found and len(unread or ()) == before:
            raise ConfigError(f"{name} holds no .yaml file. Expected a cluster YAML, or a folder of them.")
        texts |= found
    return texts


def unreadable(said: str) -> Finding:
    """One of a folder's sources that could not be looked at; the others are."""
    return error("unreadable", (), said, "Nothing is known of it.", "Mend that, or name the other files alone.")


def _folder(folder: Path, unread: dict[str, str] | None) -> Iterator[tuple[str, str]]:
    try:
        if (folder / _KUSTOMIZATION).is_file():
            yield str(folder), _build(folder)
            return
        inside = sorted(folder.iterdir())
    except (ConfigError, OSError) as problem:
        if unread is None:
            raise ConfigError(one_line(problem)) from None
        unread[str(folder)] = one_line(problem)
        return
    for path in inside:
        if path.is_dir() and not path.name.startswith("."):
            yield from _folder(path, unread)
        elif path.suffix in (".yaml", ".yml"):
            try:
                text = _text(path)
            except ConfigError as problem:
                if unread is None:
                    raise
                unread[str(path)] = str(problem)
            else:
                yield str(path), text


def _text(path: Path) -> str:
    return _decoded(str(path), path.read_bytes)


def _decoded(name: str, read: Callable[[], bytes]) -> str:
    try:
        return read().decode("utf-8").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError) as problem:
        raise ConfigError(f"{name} cannot be read: {one_line(problem)}. Expected a YAML file.") from None


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
