"""A run belongs to one live process: a small file beside it says which, and is renewed while that process lives.

It is created, renewed and taken over by compare-and-swap: atomically on a local file system, and on S3 by conditional
writes. Where a store has none of those, or of one kind alone (see `Storage.is_conditional`), the commands that want the
run put up claims first, so that one of them writes (see `claims`), and it reads the file back after a moment. An owner
that was suspended finds that its lease is another's, and whatever it had begun looks at the lease (`check_owner`)
before it changes what others restore.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from raytf._process import process_start
from raytf.errors import DamagedFileError, RunInUseError, StorageError, one_line
from raytf.storage import claims, untrusted_json
from raytf.storage.storage import Storage

LEASE_FILE = "lease.json"
RENEW_SECONDS = 4.0
#: An owner on another machine is taken for dead when its lease was not renewed for so long.
STALE_SECONDS = 20.0
_SETTLE_SECONDS = 0.5
#: Between two looks at a lease whose owner may be dead.
_LOOK_SECONDS = 1.0
_WORD = untrusted_json.optional(untrusted_json.text)
_LEASE = untrusted_json.record(
    {"id": untrusted_json.text},
    {"host": _WORD, "boot": _WORD, "pid": untrusted_json.whole, "started": _WORD, "term": untrusted_json.whole},
)


class Lease:
    """Ownership of a run. Use as a context manager around everything that writes to it.

    Args:
        run: the run's folder.
        say: told when somebody else's lease has to be watched for a while.
        clock, sleep: injected by tests.
        latest_term: returns the highest term that earlier owners left in the run, other than in a lease.

    Raises:
        RunInUseError: on entering, when another live process owns the run.
    """

    def __init__(
        self,
        run: Storage,
        say: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        latest_term: Callable[[], int] = lambda: 0,
    ):
        self._run, self._say, self._clock, self._sleep = run, say, clock, sleep
        self._latest_term = latest_term
        self.owner: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "host": socket.gethostname(),
            "boot": _boot_id(),
            "pid": os.getpid(),
            "started": process_start(os.getpid()),
            "term": 0,
        }
        self._beat = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="lease")
        #: Set when another process took the run over while this one was suspended.
        self.lost = threading.Event()

    def __enter__(self) -> Lease:
        try:
            self._take()
            self._thread.start()
        except BaseException:  # Ctrl-C, too: a lease that this process left would keep itself out
            self._stop.set()
            self._give_back()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        """Give the run back; may be called again."""
        self._stop.set()
        self._thread.join(RENEW_SECONDS)  # or its last renewal comes after the deletion
        self._give_back()

    def _take(self) -> None:
        # Looked at before anything is written: whoever comes while the owner lives is told so at once.
        version = self._wait_for_death()
        self.owner["term"] = 1 + max(self.owner["term"], self._latest_term())
        if version is None:
            claims.create(self._run, LEASE_FILE, self._text(), self._clock, self._sleep)
        else:
            claims.swap(self._run, LEASE_FILE, self._text(), version, self._clock, self._sleep)
        if not self._run.is_conditional():
            self._sleep(_SETTLE_SECONDS)  # of two that write in one instant all the same, the last one stays
        holder = _holder(self._run.get_version(LEASE_FILE))
        if holder is None or holder["id"] != self.owner["id"]:
            raise RunInUseError(self._in_use(holder or {}))

    def _give_back(self) -> None:
        try:
            holder = _holder(self._run.get_version(LEASE_FILE))
            if holder is not None and holder["id"] == self.owner["id"]:
                self._run.delete(LEASE_FILE)
        except StorageError:
            pass  # the next owner finds this process dead

    def _wait_for_death(self) -> str | None:
        """The version of the lease that a dead process left.

        Returns:
            None where there is none any more.
        """
        try:
            found = self._run.get_version(LEASE_FILE)
        except DamagedFileError as error:  # no file, or a giant one, which no owner replaces
            raise DamagedFileError(
                error.file, error.reason, "No process owns a run by such a lease: delete it."
            ) from None
        if found is None:
            return None
        try:
            first = parse(found[0], self._run.locate(LEASE_FILE))
        except DamagedFileError as error:
            # Whoever wrote it finds that it is not theirs any more, and stops.
            self._say(f"{str(error).rstrip('.')}; this process takes the run over")
            return found[1]
        self.owner["term"] = first.get("term", 0)
        if self._is_dead(first):
            return found[1]
        if first.get("boot") == self.owner["boot"]:
            raise RunInUseError(self._in_use(first))
        self._say(
            f"run {self._run.locate('')} was last owned by process {first.get('pid')} on {first.get('host')}; "
            f"watching for up to {STALE_SECONDS:.0f} s whether it still lives"
        )
        deadline = self._clock() + STALE_SECONDS
        while self._clock() < deadline:
            self._sleep(_LOOK_SECONDS)
            now = self._run.get_version(LEASE_FILE)
            if now is None:
                return None
            if now[0] != found[0]:
                raise RunInUseError(self._in_use(_holder(now) or {}))
        return found[1]

    def _is_dead(self, holder: dict) -> bool:
        """True only when it is certain: the process ran in this boot of this machine and is gone."""
        return holder.get("boot") == self.owner["boot"] and process_start(holder.get("pid", 0)) != holder.get("started")

    def _in_use(self, holder: dict) -> str:
        return (
            f"run {self._run.locate('')} is in use by process {holder.get('pid')} on {holder.get('host')}. "
            "Wait for it, stop it, or choose another --run name."
        )

    def _renew(self) -> None:
        """Keep the lease. An outage of storage ends no run; another owner cannot get in through it either."""
        failed, refused = 0, 0
        while not self._stop.wait(RENEW_SECONDS):
            try:
                found = self._run.get_version(LEASE_FILE)
                holder = _holder(found)
                if found is None or holder is None or holder["id"] != self.owner["id"]:
                    self.lost.set()
                    return
                self._beat += 1
                if self._stop.is_set():
                    return
                # Refused where another process takes over in this moment, as the next look will show.
                refused = 0 if self._run.swap(LEASE_FILE, self._text(), found[1]) else refused + 1
                problem = "storage refuses the write, and nobody else owns it" if refused > 1 else ""
            except Exception as error:  # whatever it is: a lease that is renewed no more ends the run
                problem = one_line(error, 300)
            if problem and not failed:
                self._say(
                    f"the lease of run {self._run.locate('')} cannot be renewed: {problem.rstrip('.')}. Trying again "
                    f"every {RENEW_SECONDS:.0f} s; after {STALE_SECONDS:.0f} s without a renewal a command on another "
                    "machine takes the run over"
                )
            if failed and not problem and not refused:
                self._say(f"the lease of run {self._run.locate('')} is renewed again, after {failed} failures")
            failed = failed + 1 if problem else failed if refused else 0

    def _text(self) -> bytes:
        return json.dumps({**self.owner, "beat": self._beat}).encode()


class LeaseWatch:
    """What this process has seen of a lease whose owner is on another machine: only its renewals show that it lives.
    The times of both machines are never compared."""

    def __init__(self) -> None:
        self._holder: dict[str, Any] | None = None
        #: When the lease was read last, when it was first read as it is, and when a renewal was seen.
        self._read_at = self._since = self._renewed_at = float("-inf")

    def see(self, holder: dict[str, Any], now: float) -> bool | None:
        """Take what the lease holds.

        Args:
            holder: as it was read.
            now: seconds of this machine's monotonic clock.

        Returns:
            Whether the owner lives; None if that takes another look.
        """
        if holder != self._holder:
            if now - self._read_at < STALE_SECONDS:
                self._renewed_at = now
            self._holder, self._since = holder, now
        self._read_at = now
        if now - self._renewed_at < STALE_SECONDS:
            return True
        return False if now - self._since >= 2 * RENEW_SECONDS else None


#: By the run's URI: a process that looks again and again, such as `raytf ui`, rarely has to wait.
_watches: dict[str, LeaseWatch] = {}


def is_held(
    run: Storage, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> bool:
    """Return whether a live process owns a run. For an owner on another machine, wait up to 8 s for its renewal.

    Args:
        run: the run's folder.
        clock, sleep: injected by tests.
    """
    watch = _watches.setdefault(run.uri, LeaseWatch())
    while True:
        holder = _read(run)
        if holder is None:
            return False
        if holder.get("boot") == _boot_id():
            return process_start(holder.get("pid", 0)) == holder.get("started")
        lives = watch.see(holder, clock())
        if lives is not None:
            return lives
        sleep(_LOOK_SECONDS)


def check_owner(run: Storage, owner: str) -> None:
    """Do nothing as long as a lease is its owner's; for what writes in the owner's name, in other processes too.

    Args:
        run: the run's folder.
        owner: `id` of a Lease's owner.

    Raises:
        RunInUseError: the run belongs to another process, or to none.
        StorageError: that cannot be known.
    """
    holder = _read(run)
    if holder is None or holder["id"] != owner:
        whose = f"process {holder.get('pid')} on {holder.get('host')}" if holder else "no process"
        raise RunInUseError(
            f"run {run.locate('')} belongs to {whose} now: this one was suspended or cut off, and writes no more."
        )


def _read(run: Storage) -> dict | None:
    data = run.get_or_none(LEASE_FILE, untrusted_json.SMALL)
    return _holder(None if data is None else (data, ""))


def _holder(found: tuple[bytes, str] | None) -> dict | None:
    """Who holds a lease.

    Returns:
        None where there is none, or a damaged one: whoever wrote it has lost it.
    """
    try:
        return None if found is None else parse(found[0], LEASE_FILE)
    except DamagedFileError:
        return None


def parse(data: bytes, where: str) -> dict[str, Any]:
    """Who holds a lease.

    Args:
        where: it was read from, as a person would look for it.

    Raises:
        DamagedFileError: it is none.
    """
    return untrusted_json.parse(data, where, _LEASE)


def _boot_id() -> str:
    # A container has its own process numbers, so its name space belongs to the machine's identity.
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return uuid.uuid4().hex
