"""Decides whether to wait for a submitted job, to submit it again or to give up.

Ray runs a submitted command once. If its driver or the head of the cluster dies, the run in storage is unharmed, and
the same command continues it. raytf's lease keeps a second driver out as long as the first one lives.
"""

from __future__ import annotations

import enum
import signal
from collections.abc import Callable
from dataclasses import dataclass

from raytf.config import exit_codes
from raytf.config.exit_codes import AfterEnding

#: Seconds before the first resubmission, doubled for each further one in a row; the longest pause.
FIRST_PAUSE, LONGEST_PAUSE = 2.0, 300.0
#: A job that lived for this many seconds before it died counts as progress.
LASTING_SECONDS = 600.0
#: The most refusals in a row of a command that was accepted before: a cluster may refuse it while it restarts.
REFUSALS = 3


@dataclass(frozen=True)
class JobSighting:
    """The state of a job, as the job server reports it.

    Attributes:
        status: Ray's status: PENDING, RUNNING, SUCCEEDED, FAILED or STOPPED; None if the server does not know the job.
        code: the command's exit code, negative for a signal, if it has one.
        error: Ray's name for the kind of failure.
        is_dead: whether the process that watches the command has died, and the command with it, despite `status`.
        text: Ray's message about the job.
    """

    status: str | None
    code: int | None = None
    error: str | None = None
    is_dead: bool = False
    text: str = ""


@dataclass(frozen=True)
class ResubmissionLimits:
    """The limits at which resubmission gives up.

    Attributes:
        resubmits: the most resubmissions in a row without a job that lasted; None for no limit.
        silence: the most seconds without an answer from the head.
    """

    resubmits: int | None = 20
    silence: float = 3600.0


class NextMove(enum.Enum):
    """The next action for a job."""

    WAIT = "wait"
    RESUBMIT = "resubmit"
    FINISHED = "finished"
    FAILED = "failed"
    REFUSED = "refused"
    STOPPED = "stopped"
    GIVE_UP = "give up"


@dataclass(frozen=True)
class ResubmissionDecision:
    """The next move, and why.

    Attributes:
        why: the reason, for messages, without a period.
        pause: seconds before a resubmission.
    """

    move: NextMove
    why: str = ""
    pause: float = 0.0


def judge(sight: JobSighting | None, silent: float, limits: ResubmissionLimits) -> ResubmissionDecision:
    """Decide on a job (None if the head has been silent for `silent` seconds): RESUBMIT if its run can continue."""
    if sight is None:
        if silent < limits.silence:
            return ResubmissionDecision(NextMove.WAIT)
        return ResubmissionDecision(NextMove.GIVE_UP, f"the head has not answered for {silent:.0f} s")
    match sight.status:
        case None:
            return ResubmissionDecision(NextMove.RESUBMIT, "the head restarted and does not know the job")
        case "SUCCEEDED":
            return ResubmissionDecision(NextMove.FINISHED)
        case "STOPPED":
            return ResubmissionDecision(NextMove.STOPPED, "somebody stopped the job")
        case "FAILED":
            return _failed(sight)
    if sight.is_dead:
        return ResubmissionDecision(
            NextMove.RESUBMIT, f"the job died with its head, though Ray still reports {sight.status}"
        )
    return ResubmissionDecision(NextMove.WAIT)


def _failed(sight: JobSighting) -> ResubmissionDecision:
    code = sight.code
    if code is None:
        if sight.error == "RUNTIME_ENV_SETUP_FAILURE":
            return ResubmissionDecision(NextMove.FAILED, "Ray could not set up the job's environment")
        return ResubmissionDecision(
            NextMove.RESUBMIT, f"Ray lost the job ({(sight.error or 'no reason given').lower()})"
        )
    match exit_codes.of_code(code).then:
        case AfterEnding.AGAIN if code == exit_codes.AGAIN.code:
            why = "the job lost Ray or its storage, or another process still owns its run"
            return ResubmissionDecision(NextMove.RESUBMIT, why)
        case AfterEnding.AGAIN:
            # If a signal killed its command, a shell exits with 128 plus the signal.
            return ResubmissionDecision(
                NextMove.RESUBMIT, f"the job's driver was killed ({_name(-code if code < 0 else code - 128)})"
            )
        case AfterEnding.REFUSED:
            return ResubmissionDecision(NextMove.REFUSED, f"the job was refused (exit code {code})")
        case AfterEnding.STOPPED:
            return ResubmissionDecision(NextMove.STOPPED, "somebody interrupted the job")
    return ResubmissionDecision(NextMove.FAILED, f"the job failed (exit code {code})")


def _name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


class Resubmission:
    """Decides after each poll of a job whether to submit its command again.

    Args:
        limits: when to give up.
        random: returns numbers in [0, 1), so that many clients of one lost head do not return at the same time.
    """

    def __init__(self, limits: ResubmissionLimits, random: Callable[[], float]):
        self._limits, self._random = limits, random
        self._in_a_row = self._refusals = 0
        #: Total number of resubmissions.
        self.resubmits = 0

    def decide(self, sight: JobSighting | None, silent: float, lived: float) -> ResubmissionDecision:
        """Return the next move; a RESUBMIT counts as done.

        Args:
            sight: the job's state; None if the head does not answer.
            silent: seconds since the head's last answer.
            lived: seconds since the job was submitted.
        """
        decision = judge(sight, silent, self._limits)
        if decision.move is NextMove.REFUSED and self.resubmits and self._refusals < REFUSALS:
            self._refusals += 1
            decision = ResubmissionDecision(NextMove.RESUBMIT, f"{decision.why}, but was accepted before")
        elif decision.move is NextMove.RESUBMIT:
            self._refusals = 0
        if decision.move is not NextMove.RESUBMIT:
            return decision
        if lived >= LASTING_SECONDS:
            self._in_a_row = 0
        most = self._limits.resubmits
        if most is not None and self._in_a_row >= most:
            times = (
                f"after {most} resubmission{'' if most == 1 else 's'} in a row" if most else "and is not resubmitted"
            )
            return ResubmissionDecision(NextMove.GIVE_UP, f"{decision.why}, {times}")
        self._in_a_row += 1
        self.resubmits += 1
        longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(self._in_a_row - 1, 30))
        return ResubmissionDecision(NextMove.RESUBMIT, decision.why, longest * (0.5 + 0.5 * self._random()))
