"""The command that started a run, recorded in its folder for people to read.

raytf never runs a recorded command: whoever can write to the folder could put any program there.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from raytf.config.terminal_text import visible
from raytf.errors import RunMismatchError, StorageError
from raytf.storage import untrusted_json
from raytf.storage.storage import Storage

FILE = "command.json"
_LATER = ("program", "host", "submission", "digest")
_SHAPE = untrusted_json.record(
    {"words": untrusted_json.each(untrusted_json.text), "folder": untrusted_json.text},
    dict.fromkeys(_LATER, untrusted_json.text),
)
#: Environment variable in which Ray passes a job's submission to its driver, as JSON.
_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
#: The number at the end of a job's name; `raytf submit` counts the jobs that it submits for one command.
_NUMBER = re.compile(r"-\d+$")


@dataclass(frozen=True)
class StartCommand:
    """How a Python process was started.

    Attributes:
        words: the arguments of the interpreter; empty for a notebook or an interactive interpreter.
        folder: the working directory.
        program: resolved path of the program's file; empty if the next start may have another path.
        host: name of the host.
        submission: name of the Ray job, the same for all jobs that `raytf submit` submits for one command; empty if
            the process was no job.
        digest: SHA-256 of the program's file; empty if there is none.
    """

    words: tuple[str, ...]
    folder: str
    program: str = ""
    host: str = ""
    submission: str = ""
    digest: str = ""

    def is_another_program(self, path: str, host: str, exists: Callable[[str], bool] = os.path.exists) -> bool:
        """Return whether this start certainly ran another program than the one that starts now.

        This is certain only if both ran on the same host, where this start's file still exists.

        Args:
            path: path of the program that starts now; empty if unknown.
            host: name of the host on which it starts.
        """
        return bool(path and self.program) and self.host == host and self.program != path and exists(self.program)


def of_process(program: str = "") -> StartCommand:
    """Return the command of this process.

    Args:
        program: path of its program; empty if there is none.
    """
    has_command = "ipykernel" not in sys.modules and bool(sys.argv[0])
    words = tuple(sys.orig_argv[1:]) if has_command else ()
    digest = ""
    with contextlib.suppress(OSError):
        digest = hashlib.sha256(Path(program).read_bytes()).hexdigest() if program else ""
    return StartCommand(words, os.getcwd(), program, socket.gethostname(), submission(os.environ), digest)


def submission(environment: Mapping[str, str]) -> str:
    """Return the submission to Ray's job server to which a process belongs; empty if there is none."""
    try:
        name = json.loads(environment.get(_RAY_JOB) or "{}")["metadata"]["job_submission_id"]
    except (ValueError, KeyError, TypeError):
        return ""
    return _NUMBER.sub("", name) if str(name).startswith("raytf-") else str(name)


def write(run: Storage, command: StartCommand) -> None:
    """Write a command to a run's folder, in place of that of an earlier start.

    Raises:
        StorageError: storage refuses.
    """
    if command.words or command.program:
        run.put(FILE, encoded(command))


@contextlib.contextmanager
def recorded(run: Storage, command: StartCommand) -> Iterator[bool]:
    """Write a command to a run's folder; restore the earlier one if the `with` block raises RunMismatchError.

    Yields:
        Whether the folder already had the same command, with the same contents of its program.

    Raises:
        StorageError: storage refuses.
        RunMismatchError: raised by the `with` block.
    """
    before = read_or_none(run)
    is_same = before is not None and (before.words, before.digest) == (command.words, command.digest)
    write(run, command)
    try:
        yield is_same
    except RunMismatchError:
        if before is not None:
            write(run, before)
        raise


def read_or_none(run: Storage) -> StartCommand | None:
    """Return the command of a run; None if its folder has none that can be read."""
    try:
        return read(run)
    except StorageError:  # includes a damaged file: the command is only shown to people
        return None


def encoded(command: StartCommand) -> bytes:
    """Return a command as the contents of its file."""
    return json.dumps(asdict(command)).encode()


def read(run: Storage) -> StartCommand | None:
    """Return the command of a run; None if its folder has none.

    Raises:
        DamagedFileError: the file cannot be parsed.
        StorageError: storage refuses.
    """
    fields = untrusted_json.read(run, FILE, _SHAPE)
    if fields is None:
        return None
    return StartCommand(tuple(fields["words"]), fields["folder"], *(fields.get(name, "") for name in _LATER))


def text(command: StartCommand) -> str:
    """Return a command as one shell line that is safe to show on a terminal."""
    words = list(command.words)
    is_raytf = bool(words) and Path(words[0]).name == "raytf"
    return visible(shlex.join(["raytf", *words[1:]] if is_raytf else ["python", *words]))
