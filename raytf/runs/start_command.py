"""The command that started a run, recorded in its folder for people to read.

A run's folder is data: whoever can write to it could name any program there. So nothing runs what it records.
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
#: Environment variable with which Ray tells a job's driver, as JSON, how it was submitted.
_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
#: Ends the names of jobs that `raytf submit` submits for one command.
_NUMBER = re.compile(r"-\d+$")


@dataclass(frozen=True)
class StartCommand:
    """The way in which a Python process was started.

    Attributes:
        words: what follows the interpreter; empty for a notebook or an interactive interpreter.
        folder: in which it ran.
        program: path of the program's file, without links; empty where the next start may have another one.
        host: on which it ran.
        submission: of the job as which it ran, the same for each job that `raytf submit` submits for one command;
            empty where it was no job.
        digest: SHA-256 of the program's file; empty where it has none.
    """

    words: tuple[str, ...]
    folder: str
    program: str = ""
    host: str = ""
    submission: str = ""
    digest: str = ""

    def is_another_program(self, path: str, host: str, exists: Callable[[str], bool] = os.path.exists) -> bool:
        """Return whether this start ran another program than the one at a path.

        It is another one only where this host can tell: both ran here, and both files are there.

        Args:
            path: of the program that starts now; empty where it is not known.
            host: on which it starts.
        """
        return bool(path and self.program) and self.host == host and self.program != path and exists(self.program)


def of_process(program: str = "") -> StartCommand:
    """Return the command of this process.

    Args:
        program: path of its program; empty where it has none.
    """
    has_command = "ipykernel" not in sys.modules and bool(sys.argv[0])
    words = tuple(sys.orig_argv[1:]) if has_command else ()
    digest = ""
    with contextlib.suppress(OSError):
        digest = hashlib.sha256(Path(program).read_bytes()).hexdigest() if program else ""
    return StartCommand(words, os.getcwd(), program, socket.gethostname(), submission(os.environ), digest)


def submission(environment: Mapping[str, str]) -> str:
    """Return which submission to Ray's job server a process belongs to; empty for none."""
    try:
        name = json.loads(environment.get(_RAY_JOB) or "{}")["metadata"]["job_submission_id"]
    except (ValueError, KeyError, TypeError):
        return ""
    return _NUMBER.sub("", name) if str(name).startswith("raytf-") else str(name)


def write(run: Storage, command: StartCommand) -> None:
    """Keep a command in a run's folder; the latest start of the run counts.

    Raises:
        StorageError: storage refuses.
    """
    if command.words or command.program:
        run.put(FILE, encoded(command))


@contextlib.contextmanager
def recorded(run: Storage, command: StartCommand) -> Iterator[bool]:
    """Keep a command in a run's folder, unless the run turns out to be another one.

    Yields:
        Whether the folder had the same command, with the same text of its program.

    Raises:
        StorageError: storage refuses.
        RunMismatchError: that of the `with` statement.
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
    """Return the command of a run; None where nothing readable says so."""
    try:
        return read(run)
    except StorageError:  # also a damaged file, which is for people to read
        return None


def encoded(command: StartCommand) -> bytes:
    """Return the contents of the file."""
    return json.dumps(asdict(command)).encode()


def read(run: Storage) -> StartCommand | None:
    """Return the command of a run; None where its folder has none.

    Raises:
        DamagedFileError: it cannot be read.
        StorageError: storage refuses.
    """
    fields = untrusted_json.read(run, FILE, _SHAPE)
    if fields is None:
        return None
    return StartCommand(tuple(fields["words"]), fields["folder"], *(fields.get(name, "") for name in _LATER))


def text(command: StartCommand) -> str:
    """Return a command as a line for a shell, safe to show on a terminal."""
    words = list(command.words)
    is_raytf = bool(words) and Path(words[0]).name == "raytf"
    return visible(shlex.join(["raytf", *words[1:]] if is_raytf else ["python", *words]))
