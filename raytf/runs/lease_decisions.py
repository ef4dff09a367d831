"""Decides which process owns a run, without storage, clocks or threads. `raytf.runs.lease` carries out the decisions.

`taking`, `renewing` and `giving_back` are generators. The caller sends the answer to each command that they yield, or
throws the storage's error.
"""

from __future__ import annotations

import json
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from raytf.errors import DamagedFileError, RunInUseError, StorageError, one_line
from raytf.storage import untrusted_json

RENEW_SECONDS = 4.0
#: An owner on another machine counts as dead after these seconds without a renewal.
STALE_SECONDS = 20.0
#: Number of the renewal that precedes the deletion of a lease.
_LAST_BEAT = -1
#: Seconds between two reads of a lease whose owner may be dead.
LOOK_SECONDS = 1.0
_WORD = untrusted_json.optional(untrusted_json.text)
_LEASE = untrusted_json.record(
    {"id": untrusted_json.text},
    {"host": _WORD, "boot": _WORD, "pid": untrusted_json.whole, "started": _WORD, "term": untrusted_json.whole},
)

#: The bytes of a lease and its version, or None if there is no lease.
Found = tuple[bytes, str] | None


@dataclass(frozen=True)
class Read:
    """Read the lease; the answer is a `Found`."""


@dataclass(frozen=True)
class Claim:
    """Write a lease that other processes may also write. It has no answer: read the lease to see which process won.

    Attributes:
        version: the version of the lease to replace; None if no lease may exist.
    """

    text: bytes
    version: str | None


@dataclass(frozen=True)
class Renew:
    """Replace this process's lease. The answer is whether the lease still had the version."""

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
    """Look up when a process of this machine started. The answer is that of `raytf._process.process_start`."""

    number: int


@dataclass(frozen=True)
class LatestTerm:
    """Look up the highest term that earlier owners left in the run, except in a lease. The answer is the term."""


@dataclass(frozen=True)
class Say:
    """Show a message to the user."""

    text: str


Command = Read | Claim | Renew | Delete | Wait | ProcessStart | LatestTerm | Say
Decisions = Generator[Command, Any, None]


def parse(data: bytes, where: str) -> dict[str, Any]:
    """Parse a lease, and return its holder.

    Args:
        where: the place of the file, for people.

    Raises:
        DamagedFileError: the bytes are not a lease.
    """
    return untrusted_json.parse(data, where, _LEASE)


def holder_of(lease: Found) -> dict[str, Any] | None:
    """Return the holder of a lease.

    Returns:
        None if there is no lease or it is damaged; the writer of a damaged lease has lost it.
    """
    try:
        return None if lease is None else parse(lease[0], "lease")
    except DamagedFileError:
        return None


def is_owner(lease: Found, owner: str) -> bool:
    """Return whether the owner with this `id` holds a lease."""
    holder = holder_of(lease)
    return holder is not None and holder["id"] == owner


def check(lease: Found, owner: str, run: str) -> None:
    """Check that an owner still holds a lease.

    Args:
        owner: the `id` of the owner for which the caller wants to write.
        run: the place of the run, for people.

    Raises:
        RunInUseError: the run belongs to another process, or to none.
    """
    if not is_owner(lease, owner):
        holder = holder_of(lease)
        whose = f"process {holder.get('pid')} on {holder.get('host')}" if holder else "no process"
        raise RunInUseError(f"run {run} belongs to {whose} now: this one was suspended or cut off, and writes no more.")


def taking(owner: dict[str, Any], run: str, file: str) -> Decisions:
    """Take ownership of a run after its last owner has died.

    Args:
        owner: this process; its `term` is set.
        run: the place of the run, for people.
        file: the place of its lease, for people.

    Raises:
        RunInUseError: another live process owns the run.
    """
    # Before anything is written, so that a command fails immediately if the owner is alive.
    version = yield from _wait_for_death(owner, run, file)
    owner["term"] = 1 + max(owner["term"], (yield LatestTerm()))
    yield Claim(_text(owner, 0), version)
    lease = yield Read()
    if not is_owner(lease, owner["id"]):
        raise RunInUseError(_in_use(run, holder_of(lease) or {}))


def _wait_for_death(owner: dict[str, Any], run: str, file: str) -> Generator[Command, Any, str | None]:
    """Return the version of the lease that a dead process left, or None if there is no lease."""
    lease = yield Read()
    if lease is None:
        return None
    try:
        first = parse(lease[0], file)
    except DamagedFileError as error:
        # If its writer is alive, it detects the takeover at its next renewal, and stops.
        yield Say(f"{str(error).rstrip('.')}; this process takes the run over")
        return lease[1]
    owner["term"] = first.get("term", 0)
    if first.get("boot") == owner["boot"]:
        # On the same boot of the same machine, a process that does not exist is certainly dead.
        if (yield ProcessStart(first.get("pid", 0))) != first.get("started"):
            return lease[1]
        raise RunInUseError(_in_use(run, first))
    yield Say(
        f"run {run} was last owned by process {first.get('pid')} on {first.get('host')}; "
        f"watching for up to {STALE_SECONDS:.0f} s whether it is still alive"
    )
    # Count reads, not seconds: an outage of storage, in which the owner cannot renew its lease, is only one read.
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

    An outage of storage does not stop the run, because no other process can take the lease in an outage either.

    Args:
        run: the place of the run, for people.
    """
    beat, failed, refused = 0, 0, 0
    while True:
        yield Wait(RENEW_SECONDS)
        try:
            lease = yield Read()
            if not is_owner(lease, owner["id"]):
                return
            beat += 1
            # A refusal can mean that another process is taking over the run; the next read shows it.
            refused = 0 if (yield Renew(_text(owner, beat), lease[1])) else refused + 1
            problem = "storage refuses the write, although this process owns it" if refused > 1 else ""
        except Exception as error:  # any error: without renewals, the run would lose its lease
            problem = one_line(error, 300)
        if problem and not failed:
            yield Say(
                f"the lease of run {run} cannot be renewed: {problem.rstrip('.')}. Trying again "
                f"every {RENEW_SECONDS:.0f} s; after {STALE_SECONDS:.0f} s without a renewal, a command on another "
                "machine can take over the run"
            )
        if failed and not problem and not refused:
            yield Say(f"the lease of run {run} is renewed again, after {failed} failures")
        failed = failed + 1 if problem else failed if refused else 0


def giving_back(owner: str) -> Decisions:
    """Delete the lease if the owner with this `id` holds it.

    The lease is renewed first: another process, which watched it during an outage of storage, may be about to take over
    the run, and its lease must not be deleted. A lease that was just renewed is not taken over.
    """
    try:
        lease = yield Read()
        if is_owner(lease, owner):
            is_mine = yield Renew(_text(json.loads(lease[0]), _LAST_BEAT), lease[1])
            if is_mine:
                yield Delete()
    except StorageError:
        pass  # the next owner will detect that this process is dead


def _text(owner: dict[str, Any], beat: int) -> bytes:
    return json.dumps({**owner, "beat": beat}).encode()


class LeaseWatch:
    """Watches a lease whose owner is on another machine. Only renewals show that the owner is alive; the clocks of both
    machines are never compared."""

    def __init__(self) -> None:
        self._holder: dict[str, Any] | None = None
        #: Times: when the lease was last read, first read in its current form, and last seen renewed.
        self._read_at = self._since = self._renewed_at = float("-inf")

    def see(self, holder: dict[str, Any], now: float) -> bool | None:
        """Record a read of the lease.

        Args:
            holder: the holder in the lease.
            now: the time of this machine's monotonic clock, in seconds.

        Returns:
            Whether the owner is alive; None if the lease has to be read again.
        """
        if holder != self._holder:
            if now - self._read_at < STALE_SECONDS:
                self._renewed_at = now
            self._holder, self._since = holder, now
        self._read_at = now
        if now - self._renewed_at < STALE_SECONDS:
            return True
        return False if now - self._since >= 2 * RENEW_SECONDS else None
