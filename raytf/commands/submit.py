"""`raytf submit CLUSTER_ADDRESS -- COMMAND ...`: run a job on a cluster, and submit it again until its run finishes."""

from __future__ import annotations

import contextlib
import getpass
import logging
import os
import random
import re
import shlex
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from annotated_types import Gt

from raytf.config import program
from raytf.config.setting import Rest
from raytf.config.terminal_text import log_text, say
from raytf.doctor import local_environment
from raytf.doctor.check import local_files
from raytf.doctor.finding import Severity
from raytf.errors import ConfigError

_INTERRUPTED = 130
#: The largest request that Ray's job server accepts.
MOST_BYTES = 100 << 20


@dataclass(frozen=True)
class Submit:
    """Run a command on a cluster, follow its output, and submit it again if its driver or the head dies:
    raytf submit http://HEAD:8265 -- python jobs/mnist.py --run a --storage s3://bucket/runs

    The exit code is 0 when the run has finished, 1 when it failed or was stopped, 2 when it was refused, 130 after
    Ctrl-C, which leaves the job running.
    """  # noqa: D415

    address: tyro.conf.Positional[tuple[str, ...]] = ()
    """The cluster's job server: http://HOST:8265."""
    command: Annotated[str, Rest("-- COMMAND ...")] = ""
    """What to run, as one text for a shell; or give it after `--`."""
    working_dir: str = "."
    """A folder that is packed once and sent with the job; '' for none."""
    env: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE for the job and its workers; can be repeated."""
    wait: bool = True
    """Follow the job to its end. Without it nobody submits it again."""
    max_resubmits: Annotated[str, tyro.conf.arg(metavar="N|unlimited")] = "20"
    """Most resubmissions in a row of jobs that ran for less than ten minutes."""
    head_seconds: Annotated[float, Gt(0)] = 3600.0
    """Give up after so many seconds without an answer from the head."""
    stop_on_interrupt: bool = False
    """Ctrl-C also stops the job; a run saves first."""


def main(flags: Submit) -> None:
    """Run the command; exits with its code."""
    from raytf.cluster import submission

    problem = mistake(flags)
    if problem:
        raise ConfigError(f"{problem}. Expected: raytf submit http://HOST:8265 -- python jobs/mnist.py --workers 1:4")
    address = submission.address_of(flags.address[0])
    limits = _limits(flags)
    runtime_env: dict[str, Any] = {"env_vars": submission.environment_of(flags.env)}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="raytf-submit-") as scratch:
        code = _run(flags, address, limits, runtime_env, Path(scratch))
    try:
        sys.stdout.flush()
    except OSError:  # Python would try once more, and leave with a code of its own
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def mistake(flags: Submit) -> str:
    """Return what is wrong with the address or the command, or an empty string."""
    if not flags.address:
        return "there is no address"
    if not flags.command.strip():
        return "there is nothing to run"
    if len(flags.address) > 1:
        return f"there are {len(flags.address)} addresses ({', '.join(flags.address)}), and a job runs at one"
    try:
        words = shlex.split(flags.command)
    except ValueError:
        return ""  # the shell of the job reports it
    if len(words) == 1 and re.search(r"[;&|]|^[^/]*\s", words[0]):
        return f"{words[0]!r} is in quotes, so that the shell looks for a program of that name; pass it by --command"
    return ""


def _run(flags: Submit, address: str, limits: Any, runtime_env: dict[str, Any], scratch: Path) -> int:
    from raytf.cluster import submission
    from raytf.cluster.job_server import reach

    server = reach(address)
    if flags.working_dir:
        runtime_env["working_dir"] = str(pack_working_dir(flags.working_dir, scratch))
    outside = submission.Environment(_say, _show, time.monotonic, time.sleep, random.random)
    who = f"{getpass.getuser()}@{socket.gethostname()}"
    folder = os.path.abspath(os.path.expanduser(flags.working_dir)) if flags.working_dir else ""
    origin = submission.origin_of(who, folder, runtime_env["env_vars"])
    job = submission.Submission(server, flags.command, origin, runtime_env, limits, outside)
    try:
        job.begin()
        if not flags.wait:
            _say(f"not waiting for it: {_how(address, job.name)}")
            return 0
        return job.wait()
    except KeyboardInterrupt:
        if not flags.stop_on_interrupt:
            job.leave()
        if not job.name:
            _say("interrupted before anything was submitted")
        elif flags.stop_on_interrupt:
            _say(f"interrupted; stopping job {job.name}")
            job.stop()
            _say(f"{program.next_submission(flags.command)} continues from the last checkpoint")
        else:
            _say(f"interrupted; job {job.name} continues, and nobody submits it again. {_how(address, job.name)}")
        return _INTERRUPTED


def _how(address: str, name: str) -> str:
    return f"Follow it by the same command; stop it by: ray job stop --address {address} {shlex.quote(name)}"


def _limits(flags: Submit) -> Any:
    from raytf.cluster.resubmission import ResubmissionLimits

    text = flags.max_resubmits
    if text != "unlimited" and not text.isdecimal():
        raise ConfigError(f"--max-resubmits {text}: expected a number such as 20, or unlimited.")
    return ResubmissionLimits(None if text == "unlimited" else int(text), flags.head_seconds)


def _say(message: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        say(f"raytf submit: {message}", file=sys.stderr, lines=True)


def _show(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads the output any more; the run continues
        sys.stdout.write(log_text(text))
        sys.stdout.flush()


def pack_working_dir(folder: str, into: Path) -> Path:
    """Pack a folder as `ray job submit` does: without .git, and what .gitignore and .rayignore name.

    Args:
        into: a folder for the package.

    Raises:
        ConfigError: there is no such folder, or too much is in it.
    """
    for finding in local_files.working_dir(folder, local_environment.here()):
        if finding.severity is Severity.ERROR:
            raise ConfigError(f"{finding.what}. {finding.fix}")
    return _zip(folder, into, MOST_BYTES)


def _zip(folder: str, into: Path, most: int) -> Path:
    from raytf._ray import jobs

    path = into / "working_dir.zip"
    quiet = logging.getLogger("raytf.package")
    quiet.setLevel(logging.ERROR)
    git = os.environ.get("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "0") != "1"
    try:
        jobs.pack(os.path.expanduser(folder), path, git, quiet)
    except OSError as error:
        raise ConfigError(f"--working-dir {folder} cannot be packed: {error}.") from None
    size = path.stat().st_size
    if size > most:
        raise ConfigError(
            f"--working-dir {folder} makes a package of {size >> 20} MiB, and Ray's job server takes {most >> 20} MiB. "
            "Name what is not needed in .rayignore or .gitignore; training data belongs into the bucket."
        )
    return path
