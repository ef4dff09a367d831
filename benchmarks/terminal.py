"""README's picture of a terminal: a run of which a worker is killed, and one that nothing happens to, with one hash.

    python -m benchmarks.terminal --write docs/pictures/a-death.svg

Everything in the picture was printed by the two commands that are in it, typed as they are there, with a home folder of
their own; lines of epochs are left out.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from rich.console import Console
from rich.text import Text

_COLUMNS = 80
_JOB = "python jobs/mnist.py --data digits --exact --epochs 60"
_KILLED, _ALONE = f"{_JOB} --workers 3", f"{_JOB} --workers 1 --new"
_CODE = re.compile(r"\x1b\[([0-9;?]*)([A-Za-z])")
#: Most seconds that a command may take.
_SECONDS = 600.0


class Screen:
    """The lines of a terminal, as far as raytf's display moves in them."""

    def __init__(self) -> None:
        self.lines = [""]
        self._at = 0

    def write(self, text: str) -> None:
        """Take what a program has printed."""
        place = 0
        while place < len(text):
            found = _CODE.match(text, place)
            if found:
                self._control(found[1], found[2], found[0])
                place = found.end()
                continue
            char = text[place]
            place += 1
            if char == "\n":
                self._at += 1
                if self._at == len(self.lines):
                    self.lines.append("")
            elif char == "\r":
                self._is_at_begin = True
            else:
                if self._is_at_begin:
                    self.lines[self._at], self._is_at_begin = "", False
                self.lines[self._at] += char

    _is_at_begin = False

    def _control(self, number: str, kind: str, whole: str) -> None:
        if kind == "A":
            self._at = max(0, self._at - int(number or 1))
        elif kind == "K":
            self.lines[self._at] = ""
        elif kind == "m":
            if self._is_at_begin:
                self.lines[self._at], self._is_at_begin = "", False
            self.lines[self._at] += whole


def play(command: str, home: str, act: Callable[[int, Screen], None]) -> Screen:
    """Run a command in a terminal.

    Args:
        command: of Python.
        home: the home folder, in which its runs are kept.
        act: called a few times a second with the process's id and the screen.
    """
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(_COLUMNS), "LINES": "40", "HOME": home}
        os.execv(sys.executable, [sys.executable, *command.split()[1:]])
    screen, end = Screen(), time.monotonic() + _SECONDS
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.1)[0]:
            try:
                screen.write(os.read(terminal, 1 << 16).decode(errors="replace"))
            except OSError:  # the program has ended
                break
        act(pid, screen)
    _, status = os.waitpid(pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise SystemExit("\n".join(screen.lines))
    return screen


def _step(screen: Screen) -> int:
    found = re.findall(r"step (\d+)/", "\n".join(screen.lines[-4:]))
    return int(found[-1]) if found else 0


class Killer:
    """Kills a worker in the middle, and keeps what the screen showed just before."""

    def __init__(self, at: int):
        self._at = at
        self.before: list[str] = []

    def __call__(self, pid: int, screen: Screen) -> None:
        if self.before or _step(screen) < self._at:
            return
        workers = [p for p in psutil.Process(pid).children(recursive=True) if "RayTrainWorker" in " ".join(p.cmdline())]
        self.before = [line for line in screen.lines[-3:] if "step" in line or "loss" in line]
        workers[-1].kill()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, required=True)
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:
        killer = Killer(200)
        killed = play(_KILLED, home, killer)
        alone = play(_ALONE, home, lambda pid, screen: None)
    hashes = [_hash(screen) for screen in (killed, alone)]
    if not killer.before or len(set(hashes)) != 1:
        raise SystemExit(f"no picture: {killer.before}, {hashes}")
    told = [
        f"[bold]$ {_KILLED}[/]",
        *map(_plain, killer.before),
        "",
        "[dim]# kill -9 of a worker, meanwhile[/]",
    ]
    told += [_plain(line) for line in killed.lines if re.search(r"worker|finished|weights_sha256|test accuracy", line)]
    told += ["", f"[bold]$ {_ALONE}[/]"]
    told += [_plain(line) for line in alone.lines if re.search(r"finished|weights_sha256|test accuracy", line)]
    console = Console(record=True, width=_COLUMNS, file=open(os.devnull, "w"), force_terminal=True)  # noqa: SIM115
    for line in told:
        console.print(Text.from_markup(line), soft_wrap=False)
    flags.write.parent.mkdir(parents=True, exist_ok=True)
    flags.write.write_text(console.export_svg(title="a worker dies, and nothing is lost", clear=False))
    print(console.export_text())


def _hash(screen: Screen) -> str:
    (line,) = [line for line in screen.lines if "weights_sha256" in line]
    return line.split()[-1]


def _plain(line: str) -> str:
    return _CODE.sub("", line).replace("[", r"\[")


if __name__ == "__main__":
    main()
