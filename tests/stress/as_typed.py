"""Types what pages tell a newcomer to type, and says how long it took and how long nothing was said.

    python -m tests.stress.as_typed
    python -m tests.stress.as_typed --here docs/getting-started/tutorial.md

The first one takes README and the tutorial, each in a fresh clone and a fresh environment. Of a page it takes blocks
marked `sh`, and those of Python with a title, which become files. Everything runs in one shell on a terminal of its
own, with a home folder of its own, and stops at the first command that fails.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", "docs/getting-started/tutorial.md")
_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INSTALLS = "python -m pip install"
_MARK = "@@typed@@ "


@dataclass(frozen=True)
class Typed:
    """A command that was typed.

    Attributes:
        text: its first line.
        seconds: that it took.
        silence: longest time without anything new on the terminal, seconds.
        output: of the terminal.
    """

    text: str
    seconds: float
    silence: float
    output: str


def commands(page: str, installs: bool = True) -> list[str]:
    """What a page tells one to type, as texts for a shell: each line is a command, with the lines that continue it
    after a backslash, and so is each file.

    Args:
        page: its text.
        installs: whether commands that install count.
    """
    found = []
    for kind, title, text in _BLOCK.findall(page):
        if kind == "sh":
            lines = re.split(r"(?<!\\)\n", text.rstrip("\n"))
            found += [line for line in lines if installs or not line.startswith(_INSTALLS)]
        elif title:
            found.append(f"cat > {title} <<'END_OF_FILE'\n{text}END_OF_FILE")
    return found


def type_all(
    texts: list[str], folder: Path, env: dict[str, str], show: Callable[[str], None] = lambda text: None
) -> tuple[int, list[Typed]]:
    """Type commands into one shell; its exit code, and what was typed until then.

    Args:
        texts: see `commands`.
        folder: that it starts in.
        env: of the shell.
        show: takes what the terminal says.
    """
    script = "set -e\n" + "".join(f"echo '{_MARK}'\n{text}\n" for text in texts)
    process, screen = pty.fork()
    if process == 0:
        os.chdir(folder)
        os.execvpe("bash", ["bash", "-c", script], env)
    said, began, silences = "", list[float](), list[float]()  # all of it; of each command
    last, code = time.monotonic(), None
    try:
        while (text := _read(screen)) is not None:
            now, said = time.monotonic(), said + text
            if silences:
                silences[-1] = max(silences[-1], now - last)
            if text:
                last = now
                show(text)
            for _ in range(said.count(_MARK) - len(began)):
                began.append(now)
                silences.append(0.0)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    finally:
        os.close(screen)
        if code is None:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
    ends = [*began[1:], time.monotonic()]
    rows = zip(texts, began, ends, silences, said.split(_MARK)[1:], strict=False)
    return code, [Typed(_first(text), end - start, silence, output) for text, start, end, silence, output in rows]


def _read(screen: int) -> str | None:
    """What is new on the terminal; empty after a second without anything, None at the end."""
    if not select.select([screen], [], [], 1.0)[0]:
        return ""
    try:
        return os.read(screen, 65536).decode(errors="replace") or None
    except OSError:  # the shell has ended
        return None


def _first(text: str) -> str:
    return next((line for line in text.splitlines() if line.strip()), "")


def fresh(folder: Path) -> tuple[Path, dict[str, str]]:
    """A clone of this checkout and an environment without any package: the clone, and the variables of a shell."""
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(folder / "raytf")], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    return folder / "raytf", of_shell(folder, folder / "venv" / "bin")


def of_shell(home: Path, programs: Path) -> dict[str, str]:
    """Variables of a shell with a home folder of its own, and an environment's programs."""
    kept = {
        name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "RAY_ADDRESS", "VIRTUAL_ENV")
    }
    return {
        **kept,
        "HOME": str(home),
        "PATH": f"{programs}:{os.environ['PATH']}",
        "COLUMNS": "100",
        "TERM": "xterm-256color",
    }


def main() -> None:
    """Run the command; exits with 1 where something typed fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", default=PAGES)
    parser.add_argument("--here", action="store_true", help="in this checkout and environment; nothing is installed")
    flags = parser.parse_args()
    try:
        pages = {page: commands((ROOT / page).read_text(), installs=not flags.here) for page in flags.pages}
    except OSError as error:
        parser.error(f"a page cannot be read: {error}")
    if untold := [page for page, texts in pages.items() if not texts]:
        parser.error(f"{untold[0]} has nothing to type: no block marked `sh`, and none of Python with a title")
    failed = False
    for page, texts in pages.items():
        with tempfile.TemporaryDirectory(prefix="raytf-typed-") as home:
            clone, env = (ROOT, of_shell(Path(home), Path(sys.executable).parent)) if flags.here else fresh(Path(home))
            code, done = type_all(texts, clone, env, lambda text: print(text.replace(_MARK, ""), end="", flush=True))
        seconds, silence = sum(each.seconds for each in done), max(each.silence for each in done)
        print(f"\n{page}: {seconds:.0f} s, longest silence {silence:.1f} s")
        for each in done:
            print(f"  {each.seconds:6.1f} s, silent for {each.silence:4.1f} s: {each.text}")
        failed |= code != 0
    sys.exit(failed)


if __name__ == "__main__":
    main()
