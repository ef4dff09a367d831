"""Types what pages tell a newcomer to type, and says how long it took and how long nothing was said.

    python -m tests.stress.as_typed
    python -m tests.stress.as_typed --here docs/getting-started/tutorial.md

The first one types README, the tutorial and the example notebook as on a machine where nothing is prepared: in a mount
namespace with an empty home folder, Debian's Python (`python3`, but no `python`) and without pip, make and uv. It needs
root. The pages share the clone and the environment that README's first commands make. With `--here` they are typed in
this checkout and environment, and nothing is installed.

From a page it takes the blocks marked `sh`, and Python blocks with a title, which become files. Each page is typed into
a shell of its own on a terminal, and stops at the first command that fails.
"""

from __future__ import annotations

import argparse
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README, NOTEBOOK = "README.md", "docs/getting-started/notebook.ipynb"
PAGES = (README, "docs/getting-started/tutorial.md", NOTEBOOK)
#: Seconds without anything new on a terminal after which a newcomer believes that a command hangs.
LONGEST_SILENCE = 3.0
_BLOCK = re.compile(r"^```(\w+)(?: title=\"([^\"]+)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Commands that a prepared environment does without.
_INSTALLS = ("git clone ", "python -m pip install", ". .venv/bin/activate")
#: A clone whose environment is active, which the other pages begin with; from README's commands if they were typed.
_CLONE = "git clone https://github.com/raytf/raytf"
_BEFORE = f"test -d raytf || {_CLONE}\ncd raytf\n./scripts/in-environment '' true\n. .venv/bin/activate"
#: README's program once more, in the folder in which the clone lies.
_BESIDE = "cd .. && sed s/spirals/beside/ raytf/spirals.py > beside.py && python beside.py"
_RUN_NOTEBOOK = f"python -m pip install nbclient ipykernel\njupyter execute {NOTEBOOK}"
#: Hides what bare Debian lacks, and the home folder behind an empty one; then runs a command there.
_BARE = """
set -e
mount --bind "$1" "$HOME"
shift
for folder in /usr/local/bin /usr/lib/python3*/dist-packages /usr/local/lib/python3*/dist-packages; do
    if [ -d "$folder" ]; then mount -t tmpfs none "$folder"; fi
done
for program in python pip pip3 make uv; do
    if [ -e "/usr/bin/$program" ]; then mount --bind /dev/null "/usr/bin/$program"; fi
done
cd "$HOME"
exec "$@"
"""
_MARK = "@@typed@@ "


@dataclass(frozen=True)
class Typed:
    """A command that was typed.

    Attributes:
        text: its first line.
        seconds: that it took.
        silence: longest time without anything new on the terminal, seconds.
        output: of the terminal.
        before: the last line before that time.
    """

    text: str
    seconds: float
    silence: float
    output: str
    before: str = ""


def commands(page: str) -> list[str]:
    """What a page tells one to type, as texts for a shell: each line is a command, with the lines that continue it
    after a backslash, and so is each file.

    Args:
        page: its text.
    """
    found = []
    for kind, title, text in _BLOCK.findall(page):
        if kind == "sh":
            found += re.split(r"(?<!\\)\n", text.rstrip("\n"))
        elif title:
            found.append(f"cat > {title} <<'END_OF_FILE'\n{text}END_OF_FILE")
    return found


def type_all(
    texts: list[str],
    folder: Path,
    env: dict[str, str],
    show: Callable[[str], None] = lambda text: None,
    within: Sequence[str] = (),
) -> tuple[int, list[Typed]]:
    """Type commands into one shell; its exit code, and what was typed until then.

    Args:
        texts: see `commands`.
        folder: that it starts in.
        env: of the shell.
        show: takes what the terminal says.
        within: a command that runs the shell, whose command line is appended to it.
    """
    script = "set -e\n" + "".join(f"echo '{_MARK}'\n{text}\n" for text in texts)
    process, screen = pty.fork()
    if process == 0:
        os.chdir(folder)
        shell = [*within, "bash", "-c", script]
        os.execvpe(shell[0], shell, env)
    said, began = "", list[float]()
    silences, before = list[float](), list[str]()  # of each command
    last, code = time.monotonic(), None
    try:
        while (text := _read(screen)) is not None:
            now = time.monotonic()
            if silences and now - last > silences[-1]:
                silences[-1], before[-1] = now - last, _last(said)
            said += text
            if text:
                last = now
                show(text)
            for _ in range(said.count(_MARK) - len(began)):
                began.append(now)
                silences.append(0.0)
                before.append("")
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    finally:
        os.close(screen)
        if code is None:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
    ends = [*began[1:], time.monotonic()]
    rows = zip(texts, began, ends, silences, said.split(_MARK)[1:], before, strict=False)
    return code, [Typed(_first(text), end - start, *others) for text, start, end, *others in rows]


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


def _last(text: str) -> str:
    """Return the last line of what a terminal shows, without control sequences."""
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text[-2000:]).replace("\r", "\n").splitlines()
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


def bare(home: Path) -> tuple[list[str], dict[str, str]]:
    """Prepare an empty home folder; return the command that runs a shell on a bare machine with it, and the shell's
    variables. What git clones from GitHub is this checkout there, and pip asks the same registries as here."""
    subprocess.run(["git", "clone", "--quiet", "--bare", str(ROOT), str(home / "origin.git")], check=True)
    registries = Path.home() / ".config" / "pip" / "pip.conf"
    if registries.is_file():
        (home / ".config" / "pip").mkdir(parents=True)
        shutil.copy(registries, home / ".config" / "pip")
    env = of_shell(Path.home(), Path("/usr/bin")) | {
        "PATH": "/usr/bin:/bin:/usr/sbin:/sbin",
        "GIT_CONFIG_COUNT": "1",
        "GIT_CONFIG_KEY_0": f"url.{Path.home() / 'origin.git'}.insteadOf",
        "GIT_CONFIG_VALUE_0": _CLONE.split()[-1],
    }
    return ["/usr/bin/unshare", "--mount", "sh", "-c", _BARE, "sh", str(home)], env


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


def typed_of(page: str, here: bool) -> list[str]:
    """What is typed for a page.

    Args:
        page: its path in the checkout.
        here: whether raytf is installed already.

    Raises:
        OSError: the page cannot be read.
    """
    text = (ROOT / page).read_text()
    found = _RUN_NOTEBOOK.splitlines() if page.endswith(".ipynb") else commands(text)
    if here:
        return [each for each in found if not each.startswith(_INSTALLS)]
    return [*found, _BESIDE] if page == README else [*_BEFORE.splitlines(), *found] if found else []


def main() -> None:
    """Run the command; exits with 1 where something typed fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", nargs="*", default=[page for page in PAGES if (ROOT / page).exists()])
    parser.add_argument("--here", action="store_true", help="in this checkout and environment; nothing is installed")
    flags = parser.parse_args()
    if not flags.here and os.geteuid() != 0:
        parser.error("a mount namespace needs root. Run it as root, or pass --here.")
    try:
        pages = {page: typed_of(page, flags.here) for page in flags.pages}
    except OSError as error:
        parser.error(f"a page cannot be read: {error}")
    if untold := [page for page, texts in pages.items() if not texts]:
        parser.error(f"{untold[0]} has nothing to type: no block marked `sh`, and none of Python with a title")
    failed = False
    with tempfile.TemporaryDirectory(prefix="raytf-typed-", ignore_cleanup_errors=True) as home:
        within, env = ([], of_shell(Path(home), Path(sys.executable).parent)) if flags.here else bare(Path(home))
        for page, texts in pages.items():
            code, done = type_all(texts, ROOT, env, _show, within)
            report(page, done)
            failed |= code != 0
    sys.exit(failed)


def _show(text: str) -> None:
    print(text.replace(_MARK, ""), end="", flush=True)


def report(page: str, done: list[Typed]) -> None:
    """Print how long each command of a page took, and which ones left the terminal as it was for too long."""
    seconds, silence = sum(each.seconds for each in done), max(each.silence for each in done)
    print(f"\n{page}: {seconds:.0f} s, longest silence {silence:.1f} s")
    for each in done:
        mark = "!" if each.silence > LONGEST_SILENCE else " "
        print(f"{mark} {each.seconds:6.1f} s, silent for {each.silence:4.1f} s: {each.text}")
        if each.silence > LONGEST_SILENCE:
            print(f"      after: {each.before.replace(_MARK.strip(), '(the command was typed)')}")


if __name__ == "__main__":
    main()
