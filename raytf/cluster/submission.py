"""A command on a cluster, submitted through Ray's job server until its run finishes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import secrets
import shlex
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raytf.cluster.job_server import ORIGIN, AwayError, Follower, JobServer
from raytf.cluster.resubmission import (
    JobSighting,
    NextMove,
    Resubmission,
    ResubmissionDecision,
    ResubmissionLimits,
)
from raytf.config import program
from raytf.config.command_line import EXIT_FAILED, EXIT_REFUSED
from raytf.errors import ClusterError, ConfigError

#: Seconds between two polls of a job; for a stopped job to exit.
POLL_SECONDS, STOP_SECONDS = 2.0, 60.0
#: Ray's answer while no node has an agent that starts jobs, as in the first seconds of a cluster, and how long to wait.
NO_AGENT, AGENT_SECONDS = "No available agent", 120.0
EXIT_CODES = {
    NextMove.FINISHED: 0,
    NextMove.FAILED: EXIT_FAILED,
    NextMove.STOPPED: EXIT_FAILED,
    NextMove.GIVE_UP: EXIT_FAILED,
    NextMove.REFUSED: EXIT_REFUSED,
}


@dataclass(frozen=True)
class Environment:
    """The output, clock and random numbers that a submission uses.

    Attributes:
        say: called with a line for the user.
        show: called with the output of the job.
        clock, sleep: `time.monotonic` and `time.sleep`, or replacements.
        random: returns numbers in [0, 1).
    """

    say: Callable[[str], None]
    show: Callable[[str], None]
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    random: Callable[[], float]


@dataclass
class Submission:
    """One command, submitted until its run has finished.

    Attributes:
        origin: distinguishes this command from another user's same command; see `origin_of`.
        name: name of the current job.
    """

    server: JobServer
    command: str
    origin: str
    runtime_env: dict[str, Any]
    limits: ResubmissionLimits
    outside: Environment
    name: str = ""
    _log: Follower | None = None
    _heard: float = 0.0
    _away: bool = False
    _names: str = field(default_factory=lambda: secrets.token_hex(3))
    _first: int = 0

    def begin(self) -> None:
        """Submit the command, unless the cluster already runs it.

        Raises:
            ClusterError: the cluster refuses the command, or does not answer.
        """
        began = self._heard = self.outside.clock()
        is_waiting = False
        while True:
            try:
                if not self._is_running():
                    self._submit(0)
                return
            except AwayError as error:
                if NO_AGENT not in str(error) or self.outside.clock() - began > AGENT_SECONDS:
                    text = f"the job server at {self.server.address} does not accept the job: {error}."
                    raise ClusterError(text) from None
            if not is_waiting:
                is_waiting = True
                self.outside.say("the cluster has just started and takes no jobs yet; waiting for it")
            self.outside.sleep(POLL_SECONDS)

    def wait(self) -> int:
        """Follow the job and its resubmissions to the end of the run, and return the exit code."""
        out, resubmission = self.outside, Resubmission(self.limits, self.outside.random)
        began = self._heard = out.clock()
        self._log = self.server.follow(self.name, out.show)
        while True:
            sight = self._poll()
            now = out.clock()
            decision = resubmission.decide(sight, now - self._heard, now - began)
            if decision.move is NextMove.WAIT:
                out.sleep(POLL_SECONDS)
                continue
            is_shown = self._end_log()
            if decision.move is not NextMove.RESUBMIT:
                return self._end(decision, sight, is_shown)
            out.say(f"{decision.why}; submitting it again in {decision.pause:.0f} s")
            out.sleep(decision.pause)
            self._heard = out.clock()  # the head was not polled during the pause
            if not self._submit_when_there(resubmission.resubmits):
                return self._end(
                    ResubmissionDecision(NextMove.GIVE_UP, "the head has not answered for too long"), None, True
                )
            began = out.clock()
            self._log = self.server.follow(self.name, out.show)

    def stop(self) -> None:
        out, deadline = self.outside, self.outside.clock() + STOP_SECONDS
        with contextlib.suppress(AwayError, ClusterError):  # a restarted head does not know the job
            self.server.stop(self.name)
            while self.server.inspect(self.name).status in ("PENDING", "RUNNING") and out.clock() < deadline:
                out.sleep(0.5)
        self._end_log()

    def leave(self) -> None:
        if self._log is not None:
            self._log.stop()

    def _poll(self) -> JobSighting | None:
        try:
            sight = self.server.inspect(self.name)
        except AwayError as error:
            if not self._away:
                self._away = True
                self.outside.say(f"the head does not answer ({error}); waiting for it")
            return None
        self._heard = self.outside.clock()
        if self._away:
            self._away = False
            self.outside.say("the head answers again")
            if self._log is not None:
                self._log.renew()
        return sight

    def _submit_when_there(self, number: int) -> bool:
        while self.outside.clock() - self._heard < self.limits.silence:
            try:
                if not self._is_running():  # another process that follows it may have been faster
                    self._submit(number)
            except AwayError:
                self.outside.sleep(POLL_SECONDS)
                continue
            self._heard = self.outside.clock()
            return True
        return False

    def _is_running(self) -> bool:
        running = self.server.running(self.command, self.origin)
        if running is None:
            return False
        self.name = running
        # Later jobs belong to the same submission, which identifies the run for a driver with --new.
        earlier = re.fullmatch(r"raytf-.*-([0-9a-f]{6})-(\d+)", running)
        if earlier:
            self._names, self._first = earlier[1], int(earlier[2])
        self.outside.say(f"job {running} already runs this command")
        return True

    def _submit(self, number: int) -> None:
        package = self.runtime_env.get("working_dir")
        if package is not None and not os.path.exists(package):
            again = program.next_submission(self.command).rstrip(",")
            raise ClusterError(f"the packed working directory {package} was deleted. Run {again} again.")
        run = run_of(self.command)
        name = f"raytf-{run}-{self._names}-{self._first + number}"
        self.name = name  # before submitting: if the answer is lost, the job may still run
        self.server.submit(name, self.command, dict(self.runtime_env), {"raytf_run": run, ORIGIN: self.origin})
        self.outside.say(f"submitted as job {name}")

    def _end_log(self) -> bool:
        """Show the rest of the job's log, and return whether that worked."""
        if self._log is None:
            return False
        try:
            self._log.finish(self.server.log(self.name))
        except (AwayError, ClusterError):  # the log was lost with the head
            self._log.stop()
            return False
        return True

    def _end(self, decision: ResubmissionDecision, sight: JobSighting | None, is_shown: bool) -> int:
        if decision.move is NextMove.FINISHED:
            self.outside.say(f"job {self.name} finished")
        else:
            # Ray's message about an exited command holds its last lines, which the log has shown already.
            text = ""
            if sight is not None and sight.status == "FAILED" and (sight.code is None or not is_shown):
                text = f"\n{sight.text}"
            self.outside.say(f"{decision.why}; job {self.name} is not submitted again{text}")
        return EXIT_CODES[decision.move]


def origin_of(who: str, folder: str, env: Mapping[str, str]) -> str:
    """Return a hash that differs for the same command of another user, in another folder or with other variables.

    Args:
        who: the user and the machine.
        folder: absolute path of the working directory; empty if there is none.
        env: the job's environment variables.
    """
    return hashlib.sha256(json.dumps([who, folder, sorted(env.items())]).encode()).hexdigest()[:16]


def address_of(text: str) -> str:
    """Return a job server's address from http://HOST:PORT or HOST:PORT.

    Raises:
        ConfigError: the text is not an address of a job server.
    """
    full = text if "://" in text else f"http://{text}"
    try:
        url = urllib.parse.urlsplit(full)
        fits = url.scheme in ("http", "https") and url.hostname and url.path in ("", "/") and not url.query
        fits = fits and (url.port is not None or url.scheme == "https")
    except ValueError:
        fits = False
    if not fits:
        hint = " A job server's port is usually 8265, not 10001 or 6379." if text.startswith("ray://") else ""
        raise ConfigError(f"{text!r} is not a job server's address. Pass one such as http://HOST:8265.{hint}")
    return full.rstrip("/")


def environment_of(pairs: Sequence[str]) -> dict[str, str]:
    """Parse environment variables of the form NAME=VALUE.

    Raises:
        ConfigError: a text has another form.
    """
    variables = {}
    for pair in pairs:
        name, mark, value = pair.partition("=")
        if not mark or not re.fullmatch(r"[A-Za-z_]\w*", name):
            raise ConfigError(f"--env {pair}: expected NAME=VALUE, such as --env AWS_REGION=us-east-1.")
        variables[name] = value
    return variables


def run_of(command: str) -> str:
    """Return the run from a command's --run, or its program's name, in characters that a job's name may have."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    run = next((program.name_of(word) for word in words if word.endswith(".py")), program.NO_NAME)
    for word, after in zip(words, [*words[1:], ""], strict=True):
        if word == "--run" and after:
            run = after
        elif word.startswith("--run="):
            run = word.removeprefix("--run=")
    return re.sub(r"[^\w.-]", "_", run)[:60]
