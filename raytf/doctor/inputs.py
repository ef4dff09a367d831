"""Reads YAML from files, folders, kustomizations and standard input."""

from __future__ import annotations

import os
import re
import select
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from raytf.doctor.finding import ConfigFinding, error
from raytf.errors import ConfigError, one_line
from raytf.storage import untrusted_yaml

_KUSTOMIZATION = "kustomization.yaml"
#: Keys that list the sources of a kustomization. `kubectl kustomize` uses git to fetch sources that are not paths.
_BASES = ("resources", "bases", "components", "crds", "configurations", "generators", "transformers", "validators")
#: Keys of a kustomization whose values contain no file names.
_WORDS = ("commonAnnotations", "commonLabels", "labels", "images", "metadata", "namespace")
_REMOTE = re.compile(r"^([^=]*=)?([a-z+]+::|[a-z+]+://)", re.I)
#: The most bytes to read from one source. Kubernetes limits a manifest to 1 MiB.
_MOST_BYTES = 16 << 20
#: Timeouts of a pipe, such as a shell's `<(...)`, and of building a kustomization, which may wait for the network.
_PIPE_SECONDS = _BUILD_SECONDS = 30


def read(names: Sequence[str], unread: dict[str, str] | None = None, trust: bool = False) -> dict[str, str]:
    """Return the text of each source, by name.

    Args:
        names: files, folders (all YAML files in them), kustomizations (which are built), or `-` for standard input.
        unread: receives, by path, why a source in a folder cannot be read or built. If None, an error is raised.
        trust: also build kustomizations with remote sources, which git then fetches.

    Raises:
        ConfigError: a source does not exist, or cannot be read or built.
    """
    texts: dict[str, str] = {}
    for name in names:
        if name == "-":
            texts["(standard input)"] = _decoded("standard input", lambda: sys.stdin.buffer.read(_MOST_BYTES + 1))
            continue
        path = Path(name).expanduser()
        before = len(unread or ())
        alone = not path.is_dir() or (path / _KUSTOMIZATION).is_file()
        parts = dict(_folder(path, None if alone else unread, trust, set())) if path.is_dir() else {name: _text(path)}
        if not parts and len(unread or ()) == before:
            raise ConfigError(f"{name} has no .yaml file. Pass a cluster YAML, or a folder that contains one.")
        texts |= parts
    return texts


def unreadable(problem: str) -> ConfigFinding:
    """Return the finding for a source in a folder that could not be read; the other sources are still checked."""
    return error("unreadable", (), problem, "It was not checked.", "Fix it, or pass only the other files.")


def _folder(
    folder: Path, unread: dict[str, str] | None, trust: bool, seen: set[tuple[int, int]]
) -> Iterator[tuple[str, str]]:
    try:
        about = folder.stat()
        if (about.st_dev, about.st_ino) in seen:
            return  # a link to a folder that was already read
        seen.add((about.st_dev, about.st_ino))
        if (folder / _KUSTOMIZATION).is_file():
            yield str(folder), _build(folder, trust)
            return
        inside = sorted(folder.iterdir())
    except (ConfigError, OSError) as problem:
        if unread is None:
            raise ConfigError(one_line(problem)) from None
        unread[str(folder)] = one_line(problem)
        return
    for path in inside:
        if path.is_dir() and not path.name.startswith("."):
            yield from _folder(path, unread, trust, seen)
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
    return _decoded(str(path), lambda: _bytes(path))


def _bytes(path: Path) -> bytes:
    """Return the content of a file or pipe. Reading stops once there are more than `_MOST_BYTES`.

    Raises:
        OSError: it cannot be read, nobody writes to the pipe, or the pipe sends nothing for `_PIPE_SECONDS`.
    """
    # Without O_NONBLOCK, opening a pipe that nobody writes to would wait forever.
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            return file.read(_MOST_BYTES + 1) or b""
        data, more = b"", file.read(1 << 16)
        if more == b"":
            raise OSError("it is a pipe that nobody writes to")
        while more != b"" and len(data) <= _MOST_BYTES:
            data += more or b""
            if not select.select([file], [], [], _PIPE_SECONDS)[0]:
                raise TimeoutError(f"it is a pipe or a device that sent nothing for {_PIPE_SECONDS} s")
            more = file.read(1 << 16)
        return data


def _decoded(name: str, read: Callable[[], bytes]) -> str:
    try:
        data = read()
        if len(data) > _MOST_BYTES:
            raise OSError(f"it has more than {_MOST_BYTES >> 20} MiB")
        return data.decode("utf-8-sig").replace("\r\n", "\n")
    except (OSError, UnicodeDecodeError, ValueError) as problem:
        line = f" in line {_line_of(problem)}" if isinstance(problem, UnicodeDecodeError) else ""
        raise ConfigError(f"{name} cannot be read: {one_line(problem)}{line}. Pass a YAML file.") from None


def _line_of(problem: UnicodeDecodeError) -> int:
    return 1 + problem.object.count(b"\n", 0, problem.start)


def _from_elsewhere(folder: Path, seen: set[Path]) -> str:
    """Return a source of a kustomization (or of one it includes) that is not a local path, or an empty string."""
    folder = folder.resolve()
    names = [n for n in (_KUSTOMIZATION, "kustomization.yml", "Kustomization") if (folder / n).is_file()]
    if folder in seen or not names:
        return ""
    seen.add(folder)
    try:
        value: Any = untrusted_yaml.load(_text(folder / names[0]))
    except yaml.YAMLError as problem:
        raise ConfigError(f"{folder / names[0]} is not YAML: {one_line(problem, 200)}") from None
    if not isinstance(value, dict):
        return ""
    if value.get("helmCharts") or value.get("helmChartInflationGenerator"):
        return "helm charts"
    # Wherever a kustomization names a file, it can name a URL instead.
    remote = [text for key, part in value.items() if key not in _WORDS for text in _texts(part) if _REMOTE.search(text)]
    if remote:
        return repr(remote[0][:200])
    entries = [entry for key in _BASES if isinstance(value.get(key), list) for entry in value[key]]
    for entry in [e for e in entries if isinstance(e, str) and "\n" not in e]:
        if "\0" in entry or not (folder / entry).exists():
            return repr(entry[:200])
        inner = _from_elsewhere(folder / entry, seen) if (folder / entry).is_dir() else ""
        if inner:
            return inner
    return ""


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, (dict, list)):
        for part in [v for k, v in value.items() if k != "literals"] if isinstance(value, dict) else value:
            yield from _texts(part)


def _build(folder: Path, trust: bool) -> str:
    """Return the YAML that kubectl builds from a kustomization; line numbers of findings refer to this YAML."""
    tool = shutil.which("kubectl")
    if tool is None:
        raise ConfigError(
            f"{folder} is a kustomization, but there is no kubectl to build it. Install kubectl, or build it elsewhere "
            "and pipe the result into `raytf check -`."
        )
    elsewhere = "" if trust else _from_elsewhere(folder, set())
    if elsewhere:
        raise ConfigError(
            f"{folder} was not built: it names {elsewhere}, which is not a local path and would be fetched. "
            "Pass --trust if you trust it."
        )
    try:
        done = subprocess.run(
            [tool, "kustomize", "--", str(folder)], capture_output=True, text=True, timeout=_BUILD_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{folder}: kubectl kustomize took more than {_BUILD_SECONDS} s.") from None
    if done.returncode:
        raise ConfigError(f"{folder}: kubectl kustomize failed: {one_line(done.stderr, 300)}")
    return done.stdout
