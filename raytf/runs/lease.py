"""A run belongs to one live process: a small file beside it says which, and is renewed while that process lives.

It is created, renewed and taken over by compare-and-swap: atomically on a local file system, and on S3 by conditional
writes. Where a store has none of those, or of one kind alone (see `Storage.is_conditional`), the commands that want the
run put up claims first, so that one of them writes (see `claims`), and it reads the file back after a moment. An owner
that was suspended notices that its lease is another's, and everything that it had begun checks the lease
(`check_owner`) before it changes files that others restore. `lease_decisions` has the decisions.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any

from raytf._process import process_start
from raytf.errors import DamagedFileError
from raytf.runs import lease_decisions
from raytf.runs.lease_decisions import LOOK_SECONDS, RENEW_SECONDS, LeaseWatch
from raytf.storage import claims, untrusted_json
from raytf.storage.storage import Storage

LEASE_FILE = "lease.json"
_SETTLE_SECONDS = 0.5


class Lease:
    """Ownership of a run. Use as a context manager around everything that writes to it.

    Args:
        say: called with a line when another process's lease has to be watched for a while.
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
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True, name="lease")
        #: Set when another process took the run over while this one was suspended.
        self.lost = threading.Event()

    def __enter__(self) -> Lease:
        try:
            self._carry_out(lease_decisions.taking(self.owner, self._run.locate(""), self._run.locate(LEASE_FILE)))
            self._thread.start()
        except BaseException:  # Ctrl-C, too: a lease that this process left would keep itself out
            self._stop.set()
            self._give_back()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the run; may be called again."""
        self._stop.set()
        self._thread.join(RENEW_SECONDS)  # or its last renewal comes after the deletion
        self._give_back()

    def _give_back(self) -> None:
        self._carry_out(lease_decisions.giving_back(self.owner["id"]))

    def _renew(self) -> None:
        self._carry_out(lease_decisions.renewing(self.owner, self._run.locate("")), self._stop)
        if not self._stop.is_set():
            self.lost.set()

    def _carry_out(self, decisions: lease_decisions.Decisions, stop: threading.Event | None = None) -> None:
        """Carry out commands until there are none left, or until the event is set."""
        try:
            command = next(decisions)
            while stop is None or not stop.is_set():
                try:
                    answer = self._answer(command, stop)
                except Exception as error:
                    command = decisions.throw(error)
                else:
                    command = decisions.send(answer)
        except StopIteration:
            pass

    def _answer(self, command: lease_decisions.Command, stop: threading.Event | None) -> Any:
        """Carry out a command, and return its answer; None where it has none."""
        match command:
            case lease_decisions.Read():
                return self._read()
            case lease_decisions.Claim(text, version):
                return self._claim(text, version)
            case lease_decisions.Renew(text, version):
                return self._run.swap(LEASE_FILE, text, version)
            case lease_decisions.Delete():
                return self._run.delete(LEASE_FILE)
            case lease_decisions.Wait(seconds):
                return self._sleep(seconds) if stop is None else stop.wait(seconds)
            case lease_decisions.ProcessStart(number):
                return process_start(number)
            case lease_decisions.LatestTerm():
                return self._latest_term()
            case lease_decisions.Say(text) if stop is None:
                return self._say(text)
            case lease_decisions.Say(text):
                # The reader of the output may be gone (`| head`), which must not end the renewals.
                with contextlib.suppress(OSError, SystemExit):
                    self._say(text)

    def _read(self) -> lease_decisions.Found:
        try:
            return self._run.get_version(LEASE_FILE)
        except DamagedFileError as error:  # no file, or a giant one, which no owner replaces
            raise DamagedFileError(
                error.file, error.reason, "No process owns a run by such a lease: delete it."
            ) from None

    def _claim(self, text: bytes, version: str | None) -> None:
        claims.write(self._run, LEASE_FILE, text, version, self._clock, self._sleep)
        if not self._run.is_conditional():
            self._sleep(_SETTLE_SECONDS)  # of two that write in one instant all the same, the last one stays


#: By the run's URI: a process that asks again and again, such as `raytf ui`, rarely has to wait.
_watches: dict[str, LeaseWatch] = {}


def is_held(
    run: Storage, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> bool:
    """Return whether a live process owns a run. For an owner on another machine, wait up to 8 s for its renewal."""
    watch = _watches.setdefault(run.uri, LeaseWatch())
    while True:
        holder = lease_decisions.holder_of(_read(run))
        if holder is None:
            return False
        if holder.get("boot") == _boot_id():
            return process_start(holder.get("pid", 0)) == holder.get("started")
        lives = watch.see(holder, clock())
        if lives is not None:
            return lives
        sleep(LOOK_SECONDS)


def check_owner(run: Storage, owner: str) -> None:
    """Do nothing as long as a lease is its owner's; for what writes in the owner's name, in other processes too.

    Args:
        owner: `id` of a Lease's owner.

    Raises:
        RunInUseError: the run belongs to another process, or to none.
        StorageError: that cannot be known.
    """
    lease_decisions.check(_read(run), owner, run.locate(""))


def _read(run: Storage) -> lease_decisions.Found:
    data = run.get_or_none(LEASE_FILE, untrusted_json.SMALL)
    return None if data is None else (data, "")


def _boot_id() -> str:
    # A container has its own process numbers, so its name space belongs to the machine's identity.
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return uuid.uuid4().hex
