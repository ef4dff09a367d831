"""Runs the commands that read a run on folders that a stranger has forged, and says what else happened.

`python -m tests.laws.forged_commands STORAGE OUTSIDE`: each command runs as it is typed, in a process of its own that
is forked off this one, since an import of raytf takes longer than all of them. Python's audit hook, which nothing can
take away again, sees each program that is started, each address that is connected to, and each code that is loaded out
of the folder; the last line on standard output has them as JSON.
"""

from __future__ import annotations

import gc
import http.client
import json
import os
import signal
import sys
import threading
import traceback
import urllib.parse
from pathlib import Path
from typing import Any

from raytf.commands import bisect, main, prove, replay, report, show, ui  # noqa: F401  # before the forks
from raytf.storage.storage import Storage
from raytf.ui import app

#: The reader's own program: it trains nothing, and is all that may be started.
PROGRAM = ["/bin/true"]
#: Seconds of one command, at most.
MOST_SECONDS = 20
_STARTS = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.startfile", "pty.spawn")
_SENDS = ("socket.connect", "socket.sendto", "socket.sendmsg", "socket.getaddrinfo", "urllib.Request")


def commands(run: str, good: str, page: str) -> dict[str, list[str]]:
    """What is typed."""
    step = ["--step", "30"]
    return {
        "show": ["show", run],
        "report": ["report", run, "--html", page],
        "bisect": ["bisect", good, run],
        "replay": ["replay", run, *step],
        "replay --": ["replay", run, *step, "--", *PROGRAM],
        "prove": ["prove", run],
        "prove --share 0": ["prove", run, "--share", "0"],
        "prove --": ["prove", run, "--share", "1", "--", *PROGRAM],
    }


def watch(folder: str, port: int, told: int) -> None:
    """Write each thing that must not happen to a file descriptor, from now on.

    Args:
        port: of the server of this process, which may be connected to.
    """

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and list(args[1]) == PROGRAM:
            return
        is_own = (event == "socket.connect" and args[1][1] == port) or (
            event == "socket.getaddrinfo" and args[1] == port
        )
        is_of_folder = event in ("exec", "compile", "import") and _is_code_of(folder, event, args)
        if (event in _STARTS or event in _SENDS or is_of_folder) and not is_own:
            os.write(told, (json.dumps(f"{event} {args!r}"[:300]) + "\n").encode())

    sys.addaudithook(hook)


def _is_code_of(folder: str, event: str, args: tuple[Any, ...]) -> bool:
    if event == "exec":
        return getattr(args[0], "co_filename", "").startswith(folder)
    if event == "compile":
        return str(args[1]).startswith(folder)
    return event == "import" and str(args[1]).startswith(folder)


def ran(words: list[str], folder: Path, told: int) -> int:
    """The exit code of a command, in a process of its own within a folder; negative for a signal."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(MOST_SECONDS)
        os.chdir(folder)
        watch(str(folder.parent), 0, told)
        try:
            main.main(words)
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:  # as the interpreter does
            traceback.print_exc()
            code = 99
        else:
            code = 0
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def asked(storage: Path, told: int) -> dict[str, int]:
    """How the pages answer."""
    listener, over = ui.listen("127.0.0.1", 0), threading.Event()
    port = listener.getsockname()[1]
    watch(str(storage), port, told)
    args = (Storage(str(storage)), listener, None, 1.0, over)
    threading.Thread(target=app.serve, args=args, daemon=True).start()
    paths = ["/", "/api/runs", "/run/..%2f..", "/run/good%00"]
    for name in sorted(os.listdir(storage)):
        paths += [f"{part}/{urllib.parse.quote(name)}" for part in ("/run", "/api/page", "/api/head", "/api/curves")]
        paths.append(f"/api/search/{urllib.parse.quote(name)}")
    found = {}
    for path in paths:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", path)
        found[f"ui {path}"] = connection.getresponse().status
        connection.close()
    return found


def run(storage: Path, outside: Path) -> None:
    """All commands on all folders."""
    found: dict[str, int] = {}
    log = outside / "told"
    gc.freeze()  # or each process would copy what it collects
    with open(log, "ab", buffering=0) as told:
        for folder in sorted(storage.iterdir()):
            if folder.name == "good":
                continue
            for name, words in commands(str(folder), str(storage / "good"), str(outside / "page.html")).items():
                print(f"== {folder.name}: {name}", flush=True)
                found[f"{folder.name}: {name}"] = ran(words, folder, told.fileno())
        print("== ui", flush=True)
        found |= asked(storage, told.fileno())
    print("\n" + json.dumps({"codes": found, "seen": log.read_text().splitlines()}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    run(Path(sys.argv[1]), Path(sys.argv[2]))
