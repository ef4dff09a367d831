"""Shell commands that no shell can read: found by bash itself, which parses them and runs nothing (`bash -n`)."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator

from raytf.cluster.check.finding import ConfigFinding, Path, error
from raytf.errors import one_line

_SECONDS = 5


def check(commands: Iterable[tuple[Path, str]]) -> Iterator[ConfigFinding]:
    """Find commands with a quote or a bracket that does not end, and the like. Without bash here, none."""
    commands = list(commands)
    if not _parse("\n".join(command for _, command in commands)):
        return  # one process for a good file
    for path, command in commands:
        said = _parse(command)
        if said:
            yield error(
                "shell-syntax",
                path,
                f"bash cannot read it: {said}",
                "The command fails on each node, and the node is set up again and again.",
                "Fix the quotes; in YAML, `- >-` and the command on the lines below needs no quotes around it.",
            )


def _parse(command: str) -> str:
    bash = shutil.which("bash")
    if bash is None:
        return ""
    try:
        done = subprocess.run(
            [bash, "-n"], input=command, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    first = done.stderr.splitlines()[0] if done.returncode and done.stderr else ""
    return one_line(first.partition(": line ")[2].partition(": ")[2] or first, 120)
