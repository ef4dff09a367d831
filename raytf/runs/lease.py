"""Ownership of a run by one live process: a lease file in the run's folder names the owner, which renews it.

The lease is created, renewed and taken over by compare-and-swap: atomically on a local file system, and by conditional
writes on S3. If a store does not support both kinds of conditional writes (see `Storage.is_conditional`), the competing
commands write claims first, so that only one of them writes the lease (see `claims`) and reads it back after a moment.
An owner that was suspended detects that its lease was taken over; work that it started checks the lease (`check_owner`)
before it changes files that others restore. `lease_decisions` has the decisions.
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
    """Ownership of a run. Use it as a context manager around all code that writes to the run.

    Args:
        say: called with a message before another process's lease is watched for some seconds.
        latest_term: returns the highest term that earlier owners left in the run, except in a lease.

    Raises:
        RunInUseError: on entering, if another live process owns the run.
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
        #: Set if another process took over the run while this one was suspended.
        self.lost = threading.Event()

    def __enter__(self) -> Lease:
        try:
            self._carry_out(lease_decisions.taking(self.owner, self._run.locate(""), self._run.locate(LEASE_FILE)))
            self._thread.start()
        except BaseException:  # also Ctrl-C: a lease left behind would lock out this process
            self._stop.set()
            self._give_back()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        """Release the run. It can be called more than once."""
        self._stop.set()
        self._thread.join(RENEW_SECONDS)  # otherwise its last renewal could come after the deletion
        self._give_back()

    def _give_back(self) -> None:
        self._carry_out(lease_decisions.giving_back(self.owner["id"]))

    def _renew(self) -> None:
        self._carry_out(lease_decisions.renewing(self.owner, self._run.locate("")), self._stop)
        if not self._stop.is_set():
            self.lost.set()

    def _carry_out(self, decisions: lease_decisions.Decisions, stop: threading.Event | None = None) -> None:
        """Carry out commands until none is left or the event is set."""
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
        """Carry out a command, and return its answer, if any."""
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
                # A closed output (`| head`) must not stop the renewals.
                with contextlib.suppress(OSError, SystemExit):
                    self._say(text)

    def _read(self) -> lease_decisions.Found:
        try:
            return self._run.get_version(LEASE_FILE)
        except DamagedFileError as error:  # not a file, or a giant one, which no owner replaces
            raise DamagedFileError(
                error.file, error.reason, "No process can own a run with such a lease. Delete it."
            ) from None

    def _claim(self, text: bytes, version: str | None) -> None:
        claims.write(self._run, LEASE_FILE, text, version, self._clock, self._sleep)
        if not self._run.is_conditional():
            self._sleep(_SETTLE_SECONDS)  # if two processes still write at the same time, the last one wins


#: Watches by the run's URI, so that a process that asks repeatedly, such as `raytf ui`, rarely has to wait.
_watches: dict[str, LeaseWatch] = {}


def is_held(
    run: Storage, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
) -> bool:
    """Return whether a live process owns a run. If the owner is on another machine, wait up to 8 s for a renewal."""
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
    """Check that an owner still has the lease. Any process that writes for the owner can call it.

    Args:
        owner: the `id` of a Lease's owner.

    Raises:
        RunInUseError: the run belongs to another process, or to none.
        StorageError: the lease cannot be read.
    """
    lease_decisions.check(_read(run), owner, run.locate(""))


def _read(run: Storage) -> lease_decisions.Found:
    data = run.get_or_none(LEASE_FILE, untrusted_json.SMALL)
    return None if data is None else (data, "")


def _boot_id() -> str:
    # Containers have their own process numbers, so the PID namespace is part of the machine's identity.
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return uuid.uuid4().hex
