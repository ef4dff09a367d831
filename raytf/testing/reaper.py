"""Ends what a test has started if the test itself is killed and cannot clean up.

A process of its own reads from a pipe which sessions and folders there are. When the pipe closes, whoever wrote to it
has ended, and it removes what was not taken back.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from raytf.testing.processes import Session

_ROOT = Path(__file__).parents[2]
_lock = threading.Lock()
_guard: subprocess.Popen[str] | None = None


def watch(target: Session | Path) -> None:
    """End this session, or remove this folder, when the present process ends without having done so."""
    _tell("+", target)


def forget(target: Session | Path) -> None:
    """Take back what `watch` was told, as it is gone."""
    _tell("-", target)


def _tell(sign: str, target: Session | Path) -> None:
    global _guard
    with _lock:
        if _guard is None:
            _guard = subprocess.Popen(
                [sys.executable, "-c", "from raytf.testing import reaper; reaper.main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
                cwd=_ROOT,
                start_new_session=True,
            )
        assert _guard.stdin is not None
        # A second net: its loss is no reason to fail a test.
        with contextlib.suppress(OSError):
            text = f"{target.leader} {target.started}" if isinstance(target, Session) else str(target)
            _guard.stdin.write(f"{sign}{text}\n")
            _guard.stdin.flush()


def main() -> None:
    """Keep a list of what there is until standard input ends; then end and remove it."""
    targets: list[str] = []
    for line in sys.stdin:
        sign, target = line[0], line[1:].rstrip("\n")
        if sign == "+":
            targets.append(target)
        elif target in targets:
            targets.remove(target)
    # The newest first: a node before the head that it would miss, a folder after those who write in it.
    for target in reversed(targets):
        if target.startswith("/"):
            shutil.rmtree(target, ignore_errors=True)
        else:
            leader, started = target.split()
            Session(int(leader), int(started)).end()
