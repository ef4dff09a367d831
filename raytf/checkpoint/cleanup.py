"""Deletion of checkpoints on storage that nobody needs, which rank 0 does beside training."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass

from raytf._process import in_thread
from raytf.checkpoint import manifest
from raytf.checkpoint.manifest import FOLDER, CheckpointDocument
from raytf.checkpoint.naming import GroupAttempt, attempt_of, is_of_dead_attempt, restore_order, split_name
from raytf.config.objective import MetricObjective
from raytf.errors import CheckpointError, RunInUseError, RunMismatchError, StorageError
from raytf.storage.storage import Storage


@dataclass(frozen=True)
class Keep:
    """The checkpoints to keep.

    Attributes:
        newest: how many complete ones.
        goal: whose best checkpoint stays too; None for none.
    """

    newest: int
    goal: MetricObjective | None = None


@dataclass(eq=False)
class Cleanup:
    """Retention of one run, and removal of saves that failed; each in a thread, at most one of a kind.

    Attributes:
        run: the run's folder.
        attempt: the present one.
        keep: what stays.
        say: reports what is damaged, and that nothing could be deleted.
        fence: raises if the run belongs to another owner; called before anything is deleted.
        under_way: returns the names of checkpoints that are being written.
    """

    run: Storage
    attempt: GroupAttempt
    keep: Keep
    say: Callable[[str], None]
    fence: Callable[[], None]
    under_way: Callable[[], list[str]]

    def __post_init__(self) -> None:
        #: Attempts of which nobody writes any more, but for what is under way.
        self._over = {self.attempt.name, *self.attempt.earlier}
        #: Checkpoints that were inspected, with the metric's value.
        self._values: dict[str, float | None] = {}
        self._is_swept = False
        #: Complete ones that stay, and those that could not be restored.
        self._needed: list[str] = []
        self._damaged: list[str] = []
        #: Set if there is something to inspect, and the thread that does it.
        self._is_due = threading.Event()
        self._retention: Future[None] | None = None
        self._removal: Future[None] | None = None

    def continue_from(self, restored: str | None, damaged: Collection[str]) -> None:
        """Keep the restored checkpoint until a newer one is complete, and delete damaged ones first."""
        self._needed = [] if restored is None else [restored]
        self._damaged = list(damaged)

    def completed(self, name: str) -> None:
        """Note that a checkpoint is complete, and start to delete those that it replaces."""
        self._needed = [name]
        self._is_due.set()
        self._begin()

    def settle(self, seconds: float) -> None:
        """Wait until nothing is left to do, but at most for some seconds."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._begin()
            if self._retention is None or self._retention.done():
                return
            with contextlib.suppress(TimeoutError):
                self._retention.result(max(0.0, deadline - time.monotonic()))

    def remove(self, names: Collection[str]) -> None:
        """Remove what there is of saves that failed, unless an earlier removal is still at work."""
        if self._removal is None or self._removal.done():
            self._removal = in_thread(lambda: self._remove(names))

    def _begin(self) -> None:
        # Not a part of the save: a checkpoint counts although its store may be slow to delete others.
        if self._is_due.is_set() and (self._retention is None or self._retention.done()):
            self._retention = in_thread(self._retain_while_due)

    def _remove(self, names: Collection[str]) -> None:
        with contextlib.suppress(StorageError):  # what stays is not a checkpoint, and retention finds it later
            for name in names:
                # One that was given up in the moment in which it became complete is as good as any.
                if not self.run.exists(f"{FOLDER}/{name}/{manifest.FILE}"):
                    manifest.delete(self.run, name)

    def _retain_while_due(self) -> None:
        while self._is_due.is_set():
            self._is_due.clear()
            self._retain()

    def _retain(self) -> None:
        try:
            names = [n.rstrip("/") for n in self.run.list(FOLDER) if n.endswith("/")]
            # Between the two lists: a folder of the first that is under way no more is complete in the second.
            writing = self.under_way()
            complete = manifest.list_complete(self.run)
            damaged = {*self._damaged, *self._find_damaged(complete)}
            needed = set(self._needed)
            if self.keep.goal is not None:
                best = self.keep.goal.best({n: self._values.get(n) for n in complete if n not in damaged})
                needed |= set() if best is None else {best}
            self.fence()
            present = self.attempt.name
            for old in to_delete(names, complete, self.keep.newest, present, damaged, needed, self._over, writing):
                manifest.delete(self.run, old)
            if not self._is_swept:
                # An attempt whose very first file was cut off is in no list.
                self.run.abort_uploads("", lambda file: is_of_dead_attempt(file, present, self._over))
                self._is_swept = True
        except (StorageError, RunInUseError) as error:
            self.say(f"old checkpoints could not be deleted: {error}")

    def _find_damaged(self, complete: list[str]) -> list[str]:
        """Inspect new checkpoints, and the newest one again, before older ones are deleted. Return the damaged ones."""
        damaged = []
        for name in complete:
            if name in self._damaged or (name in self._values and name != complete[0]):
                continue
            try:
                body = manifest.read(self.run, name)
                sizes = {file.name: file.bytes for file in self.run.files(f"{FOLDER}/{name}")}
                problems = manifest.size_problems(body["shares"], sizes)
                if problems:
                    raise CheckpointError(f"checkpoint {name}: {problems[0]}")
            except CheckpointError as error:
                self.say(f"{str(error).rstrip('.')}; it counts for nothing")
                damaged.append(name)
            except RunMismatchError:
                self._values[name] = None  # a newer raytf can read it
            else:
                goal, document = self.keep.goal, CheckpointDocument.parse(body["document"])
                self._values[name] = None if goal is None else goal.value_at(body["step"], document.history)
        self._values = {name: value for name, value in self._values.items() if name in complete}
        return damaged


def to_delete(
    names: Collection[str],
    complete: Collection[str],
    keep: int,
    attempt: str,
    damaged: Collection[str] = (),
    needed: Collection[str] = (),
    over: Collection[str] = (),
    writing: Collection[str] = (),
) -> list[str]:
    """Return the checkpoints to delete: complete ones but the newest `keep`, and unfinished ones that nobody writes.

    Damaged ones go first and count for nothing; needed ones (just written, restored from, the best) stay whatever their
    step. Where no good one is left, all stay.

    An unfinished one is nobody's when its attempt is over, or when it is older than the newest complete one and of
    another attempt.

    Args:
        names: all folders.
        complete: those with a manifest.
        keep: how many complete ones stay.
        attempt: the present one.
        damaged: complete ones that cannot be restored.
        needed: complete ones that stay.
        over: attempts whose unfinished saves are not written any more, whatever their step.
        writing: unfinished ones that are being written all the same.
    """
    newest_first = restore_order(set(complete) - set(damaged))
    if not newest_first:
        return []
    surplus = [n for n in newest_first[max(1, keep) :] if n not in needed]
    surplus += [n for n in damaged if n in complete]
    unfinished = set(names) - set(complete)
    orphans = [
        n
        for n in unfinished - set(writing)
        if split_name(n)[0] >= 0
        and (attempt_of(n) in over or (n < newest_first[0] and not split_name(n)[1].startswith(attempt)))
    ]
    return sorted([*surplus, *orphans])
