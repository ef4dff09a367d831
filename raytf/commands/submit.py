"""`raytf submit CLUSTER_ADDRESS -- COMMAND ...`: run a job on a cluster, and resubmit it until its run finishes."""

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
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from annotated_types import Gt

from raytf.cluster.autostop import with_timer
from raytf.config import program
from raytf.config.setting import Rest
from raytf.config.terminal_text import log_text, say
from raytf.doctor import local_environment
from raytf.doctor.check import local_files
from raytf.doctor.finding import Severity
from raytf.errors import ConfigError

if TYPE_CHECKING:  # Ray takes a second
    from raytf.cluster.submission import Environment

_INTERRUPTED = 130
#: The largest request that Ray's job server accepts.
MOST_BYTES = 100 << 20


@dataclass(frozen=True)
class Submit:
    """Run a command on a cluster, follow its output, and submit it again if its driver or the head dies:
    raytf submit http://HEAD:8265 -- python jobs/mnist.py --run a --storage s3://bucket/runs

    The exit code is 0 if the run finished, 1 if it failed or was stopped, 2 if it was refused, and 130 after Ctrl-C,
    which leaves the job running.
    """  # noqa: D415

    address: tyro.conf.Positional[tuple[str, ...]] = ()
    """The cluster's job server: http://HOST:8265."""
    command: Annotated[str, Rest("-- COMMAND ...")] = ""
    """The command to run, as one text for a shell; passing it after `--` is easier."""
    working_dir: str = "."
    """A folder that is packed once and uploaded with the job; '' for none."""
    env: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """NAME=VALUE for the job and its workers; can be repeated."""
    wait: bool = True
    """Follow the job until it ends. With --no-wait, it is not submitted again."""
    max_resubmits: Annotated[str, tyro.conf.arg(metavar="N|unlimited")] = "20"
    """Maximum number of consecutive resubmissions of jobs that ran for less than ten minutes."""
    head_seconds: Annotated[float, Gt(0)] = 3600.0
    """Give up after this many seconds without an answer from the head."""
    stop_on_interrupt: bool = False
    """Also stop the job on Ctrl-C; the run saves first."""
    autostop: str = ""
    """End the cluster on AWS, Azure or Google Cloud, its head too, when no job has run for so long, such as 15m."""


def main(flags: Submit) -> None:
    """Run the command, and exit with its code."""
    from raytf.cluster import submission

    problem = mistake(flags)
    if problem:
        raise ConfigError(f"{problem}. Expected: raytf submit http://HOST:8265 -- python jobs/mnist.py --workers 1:4")
    address = submission.address_of(flags.address[0])
    limits = _limits(flags)
    flags = replace(flags, command=with_timer(flags.command, flags.autostop))
    runtime_env: dict[str, Any] = {"env_vars": submission.environment_of(flags.env)}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="raytf-submit-") as scratch:
        code = _run(flags, address, limits, runtime_env, Path(scratch))
    try:
        sys.stdout.flush()
    except OSError:  # Python would flush again and exit with another code
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(code)


def mistake(flags: Submit) -> str:
    """Return what is wrong with the address or the command, or an empty string."""
    if not flags.address:
        return "No address given"
    if not flags.command.strip():
        return "No command given"
    if len(flags.address) > 1:
        return f"{len(flags.address)} addresses given ({', '.join(flags.address)}); a job runs at one"
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
    outside = at_terminal(_say)
    who = f"{getpass.getuser()}@{socket.gethostname()}"
    folder = os.path.abspath(os.path.expanduser(flags.working_dir)) if flags.working_dir else ""
    origin = submission.origin_of(who, folder, runtime_env["env_vars"])
    job = submission.Submission(server, flags.command, origin, runtime_env, limits, outside)
    try:
        job.begin()
        if not flags.wait:
            _say(f"not waiting for the job. {_how(address, job.name)}")
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
            _say(f"interrupted; job {job.name} continues, but will not be resubmitted. {_how(address, job.name)}")
        return _INTERRUPTED


def at_terminal(tell: Callable[[str], None]) -> Environment:
    """Return the surroundings of a submission that a user follows, who reads lines by `tell`."""
    from raytf.cluster.submission import Environment

    return Environment(tell, _show, time.monotonic, time.sleep, random.random)


def _how(address: str, name: str) -> str:
    return f"To follow it, run the same command; to stop it: ray job stop --address {address} {shlex.quote(name)}"


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
    with contextlib.suppress(OSError, ValueError):  # the output is closed; the run continues
        sys.stdout.write(log_text(text))
        sys.stdout.flush()


def pack_working_dir(folder: str, into: Path) -> Path:
    """Pack a folder as `ray job submit` does: without .git and the files that .gitignore and .rayignore name.

    Args:
        into: the folder for the package.

    Raises:
        ConfigError: the folder does not exist, or is too large.
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
            f"--working-dir {folder}: the package has {size >> 20} MiB, but Ray's job server accepts {most >> 20} MiB. "
            "List unneeded files in .rayignore or .gitignore, and keep training data in the bucket."
        )
    return path
