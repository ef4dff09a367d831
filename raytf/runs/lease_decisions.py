"""Decides who owns a run, without storage, clocks or threads; `raytf.runs.lease` carries out the decisions.

`taking`, `renewing` and `giving_back` are generators: they yield a command and are sent its answer, or get the error
of storage raised where they wait.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from raytf.errors import DamagedFileError, RunInUseError, StorageError, one_line
from raytf.storage import untrusted_json

RENEW_SECONDS = 4.0
#: An owner on another machine counts as dead when its lease was not renewed for this long.
STALE_SECONDS = 20.0
#: Number of the renewal that precedes the deletion of a lease.
_LAST_BEAT = -1
#: Seconds between two looks at a lease whose owner may be dead.
LOOK_SECONDS = 1.0
_WORD = untrusted_json.optional(untrusted_json.text)
_LEASE = untrusted_json.record(
    {"id": untrusted_json.text},
    {"host": _WORD, "boot": _WORD, "pid": untrusted_json.whole, "started": _WORD, "term": untrusted_json.whole},
)

#: Bytes of a lease as it was read, and its version; None where there is none.
Found = tuple[bytes, str] | None


@dataclass(frozen=True)
class Read:
    """Read the lease; the answer is a `Found`."""


@dataclass(frozen=True)
class Claim:
    """Write a lease that others may want to write as well. No answer: it must be read again to know who has won.

    Attributes:
        version: of the lease that it replaces; None where there must be none.
    """

    text: bytes
    version: str | None


@dataclass(frozen=True)
class Renew:
    """Replace a lease that is this process's; the answer is whether it still was of the version."""

    text: bytes
    version: str


@dataclass(frozen=True)
class Delete:
    """Delete the lease."""


@dataclass(frozen=True)
class Wait:
    """Wait for some seconds."""

    seconds: float


@dataclass(frozen=True)
class ProcessStart:
    """The answer is when a process of this machine was started, as `raytf._process.process_start` says it."""

    number: int


@dataclass(frozen=True)
class LatestTerm:
    """The answer is the highest term that earlier owners left in the run, other than in a lease."""


@dataclass(frozen=True)
class Say:
    """Tell the user something."""

    text: str


Command = Read | Claim | Renew | Delete | Wait | ProcessStart | LatestTerm | Say
Decisions = Generator[Command, Any, None]


def parse(data: bytes, where: str) -> dict[str, Any]:
    """Return who holds a lease.

    Args:
        where: it was read from, as a person would look for it.

    Raises:
        DamagedFileError: it is no lease.
    """
    return untrusted_json.parse(data, where, _LEASE)


def holder_of(lease: Found) -> dict[str, Any] | None:
    """Return who holds a lease.

    Returns:
        None where there is none, or a damaged one: whoever wrote it has lost it.
    """
    try:
        return None if lease is None else parse(lease[0], "lease")
    except DamagedFileError:
        return None


def is_owner(lease: Found, owner: str) -> bool:
    """Return whether a lease is an owner's, by its `id`."""
    holder = holder_of(lease)
    return holder is not None and holder["id"] == owner


def check(lease: Found, owner: str, run: str) -> None:
    """Do nothing as long as a lease is its owner's.

    Args:
        owner: `id` of the owner in whose name something is to be written.
        run: where the run is, for people.

    Raises:
        RunInUseError: the run belongs to another process, or to none.
    """
    if not is_owner(lease, owner):
        holder = holder_of(lease)
        whose = f"process {holder.get('pid')} on {holder.get('host')}" if holder else "no process"
        raise RunInUseError(f"run {run} belongs to {whose} now: this one was suspended or cut off, and writes no more.")


def taking(owner: dict[str, Any], run: str, file: str) -> Decisions:
    """Take a run, once its last owner is dead.

    Args:
        owner: this process; gets its term.
        run: where the run is, for people.
        file: where its lease is, for people.

    Raises:
        RunInUseError: another live process owns the run.
    """
    # Before anything is written, so that a command that starts while the owner lives fails at once.
    version = yield from _wait_for_death(owner, run, file)
    owner["term"] = 1 + max(owner["term"], (yield LatestTerm()))
    yield Claim(_text(owner, 0), version)
    lease = yield Read()
    if not is_owner(lease, owner["id"]):
        raise RunInUseError(_in_use(run, holder_of(lease) or {}))


def _wait_for_death(owner: dict[str, Any], run: str, file: str) -> Generator[Command, Any, str | None]:
    """Return the version of the lease that a dead process left; None where there is none any more."""
    lease = yield Read()
    if lease is None:
        return None
    try:
        first = parse(lease[0], file)
    except DamagedFileError as error:
        # Its writer notices at its next renewal that the lease is another's, and stops.
        yield Say(f"{str(error).rstrip('.')}; this process takes the run over")
        return lease[1]
    owner["term"] = first.get("term", 0)
    if first.get("boot") == owner["boot"]:
        # A process of this boot of this machine is certain to be dead when it is gone.
        if (yield ProcessStart(first.get("pid", 0))) != first.get("started"):
            return lease[1]
        raise RunInUseError(_in_use(run, first))
    yield Say(
        f"run {run} was last owned by process {first.get('pid')} on {first.get('host')}; "
        f"watching for up to {STALE_SECONDS:.0f} s whether it still lives"
    )
    # Reads are counted, not seconds: an outage of storage, in which the owner cannot renew its lease, is one read.
    for _ in range(round(STALE_SECONDS / LOOK_SECONDS)):
        yield Wait(LOOK_SECONDS)
        now = yield Read()
        if now is None:
            return None
        if now[0] != lease[0]:
            raise RunInUseError(_in_use(run, holder_of(now) or {}))
    return lease[1]


def _in_use(run: str, holder: dict[str, Any]) -> str:
    return (
        f"run {run} is in use by process {holder.get('pid')} on {holder.get('host')}. "
        "Wait for it, stop it, or choose another --run name."
    )


def renewing(owner: dict[str, Any], run: str) -> Decisions:
    """Renew a lease until it is lost, which ends the generator.

    An outage of storage ends no run; another owner cannot get in through it either.

    Args:
        run: where the run is, for people.
    """
    beat, failed, refused = 0, 0, 0
    while True:
        yield Wait(RENEW_SECONDS)
        try:
            lease = yield Read()
            if not is_owner(lease, owner["id"]):
                return
            beat += 1
            # Refused while another process takes the run over, as the next read will show.
            refused = 0 if (yield Renew(_text(owner, beat), lease[1])) else refused + 1
            problem = "storage refuses the write, and nobody else owns it" if refused > 1 else ""
        except Exception as error:  # whatever it is: a lease that is renewed no more ends the run
            problem = one_line(error, 300)
        if problem and not failed:
            yield Say(
                f"the lease of run {run} cannot be renewed: {problem.rstrip('.')}. Trying again "
                f"every {RENEW_SECONDS:.0f} s; after {STALE_SECONDS:.0f} s without a renewal a command on another "
                "machine takes the run over"
            )
        if failed and not problem and not refused:
            yield Say(f"the lease of run {run} is renewed again, after {failed} failures")
        failed = failed + 1 if problem else failed if refused else 0


def giving_back(owner: str) -> Decisions:
    """Delete the lease if it is an owner's, by its `id`.

    The lease is renewed first. Another process, which watched it during an outage of storage, may be about to take the
    run over, and the lease of that process must not be deleted. Nobody takes over a lease that was renewed just now.
    """
    try:
        lease = yield Read()
        if is_owner(lease, owner):
            is_mine = yield Renew(_text(json.loads(lease[0]), _LAST_BEAT), lease[1])
            if is_mine:
                yield Delete()
    except StorageError:
        pass  # the next owner finds this process dead


def _text(owner: dict[str, Any], beat: int) -> bytes:
    return json.dumps({**owner, "beat": beat}).encode()


class LeaseWatch:
    """Watches a lease whose owner is on another machine: only its renewals show that it lives. The times of both
    machines are never compared."""

    def __init__(self) -> None:
        self._holder: dict[str, Any] | None = None
        #: Times: when the lease was last read, first read in its current form, and last seen renewed.
        self._read_at = self._since = self._renewed_at = float("-inf")

    def see(self, holder: dict[str, Any], now: float) -> bool | None:
        """Take what the lease holds.

        Args:
            holder: as it was read.
            now: seconds of this machine's monotonic clock.

        Returns:
            Whether the owner lives; None if the lease has to be read again.
        """
        if holder != self._holder:
            if now - self._read_at < STALE_SECONDS:
                self._renewed_at = now
            self._holder, self._since = holder, now
        self._read_at = now
        if now - self._renewed_at < STALE_SECONDS:
            return True
        return False if now - self._since >= 2 * RENEW_SECONDS else None
