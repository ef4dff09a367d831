"""Packages that commands of `ray up` pin to versions which contradict each other."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from raytf.doctor.check.shell_commands import setup_commands
from raytf.doctor.document import Document
from raytf.doctor.finding import ConfigFinding, Path, error
from raytf.doctor.local_environment import Surroundings

_INSTALL = re.compile(r"\bpip3?\s+install\s([^;&|]*)")
#: A requirement such as `numpy==2.1`, with its extras. Versions with a wildcard, a variable or a second condition are
#: left alone.
_PIN = re.compile(r"(?<![\w.=/:-])([A-Za-z0-9][\w.-]*)(?:\[[\w,.-]*\])?\s*==\s*([\w.!+]+)(?![\w.*$,;])")
_COMMENT = re.compile(r"(^|\s)#.*$", re.M)
_CONSTRAINTS = re.compile(r"(?:^|\s)(?:-c|--constraint)[\s=]\s*[\"']?([^\s\"']+)")


def check(document: Document, here: Surroundings) -> Iterator[ConfigFinding]:
    """Find packages that a `pip install` pins to two versions, or to a version that its constraints file excludes."""
    for path, command in setup_commands(document):
        for install in _INSTALL.findall(_COMMENT.sub("", command)):
            yield from _install(install, path, document, here)


def _install(install: str, path: Path, document: Document, here: Surroundings) -> Iterator[ConfigFinding]:
    known: dict[str, tuple[str, str]] = {}
    for file in _CONSTRAINTS.findall(install):
        for line in _lines(file, document, here):
            match = _PIN.match(line)
            if match and ";" not in line:
                known.setdefault(_name(match[1]), (match[2], f"{file} pins it to {match[2]}"))
    for name, version in _PIN.findall(install):
        other, reason = known.setdefault(_name(name), (version, f"{name}=={version} stands there too"))
        if _release(other) != _release(version):
            what = f"{name}=={version} is installed, and {reason}"
            why = "pip refuses the command (`ResolutionImpossible`), and the node is set up again and again."
            yield error("pins-differ", path, what, why, f"Write {name}=={other}, or change the other pin.")


def _lines(file: str, document: Document, here: Surroundings) -> list[str]:
    """Return the lines of a file of constraints that is mounted by this name, if this machine has it."""
    for remote, local in document.mapping("file_mounts").items():
        if isinstance(local, str) and os.path.basename(remote) == os.path.basename(file):
            source = here.local(local)
            if source.is_file() and source.stat().st_size < 1 << 20:
                return source.read_text(encoding="utf-8", errors="replace").splitlines()
    return []


def _name(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _release(version: str) -> str:
    """Return a version as pip compares it: without a local part and zeros at the end, which constraints may omit."""
    return re.sub(r"(\.0)+$", "", version.partition("+")[0].removeprefix("v").lower())
