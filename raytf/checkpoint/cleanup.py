"""Deletes checkpoints on storage that are no longer needed, on rank 0, while training continues."""

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
        newest: how many of the newest complete checkpoints.
        goal: the metric whose best checkpoint is kept, too; None for no metric.
    """

    newest: int
    goal: MetricObjective | None = None


@dataclass(eq=False)
class Cleanup:
    """Deletes old checkpoints of a run, and files of failed saves. Each of the two uses at most one thread at a time.

    Attributes:
        run: the run's folder.
        attempt: the present attempt.
        keep: the checkpoints to keep.
        say: reports damaged checkpoints, and deletions that failed.
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
        #: Attempts whose saves are no longer written, except for those under way.
        self._over = {self.attempt.name, *self.attempt.earlier}
        #: Inspected checkpoints and their values of the metric.
        self._values: dict[str, float | None] = {}
        self._is_swept = False
        #: Complete checkpoints to keep, and checkpoints that could not be restored.
        self._needed: list[str] = []
        self._damaged: list[str] = []
        #: Set if there is something to delete, and the thread that deletes it.
        self._is_due = threading.Event()
        self._retention: Future[None] | None = None
        self._removal: Future[None] | None = None

    def continue_from(self, restored: str | None, damaged: Collection[str]) -> None:
        """Keep the restored checkpoint until a newer one is complete. The next cleanup deletes the damaged ones."""
        self._needed = [] if restored is None else [restored]
        self._damaged = list(damaged)

    def completed(self, name: str) -> None:
        """Record that a checkpoint is complete, and start to delete the checkpoints that it replaces."""
        self._needed = [name]
        self._is_due.set()
        self._begin()

    def settle(self, seconds: float) -> None:
        """Wait until nothing is left to delete, but at most `seconds`."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._begin()
            if self._retention is None or self._retention.done():
                return
            with contextlib.suppress(TimeoutError):
                self._retention.result(max(0.0, deadline - time.monotonic()))

    def remove(self, names: Collection[str]) -> None:
        """Remove the files of failed saves, unless an earlier removal is still running."""
        if self._removal is None or self._removal.done():
            self._removal = in_thread(lambda: self._remove(names))

    def _begin(self) -> None:
        # In a thread, because a checkpoint counts even while the store is slow to delete others.
        if self._is_due.is_set() and (self._retention is None or self._retention.done()):
            self._retention = in_thread(self._retain_while_due)

    def _remove(self, names: Collection[str]) -> None:
        with contextlib.suppress(StorageError):  # remaining files are no checkpoint, and are deleted later
            for name in names:
                # A save that became complete at the moment when it was given up is a valid checkpoint.
                if not self.run.exists(f"{FOLDER}/{name}/{manifest.FILE}"):
                    manifest.delete(self.run, name)

    def _retain_while_due(self) -> None:
        while self._is_due.is_set():
            self._is_due.clear()
            self._retain()

    def _retain(self) -> None:
        try:
            names = [n.rstrip("/") for n in self.run.list(FOLDER) if n.endswith("/")]
            # Ask between the two lists: a folder of the first whose save has just ended is complete in the second.
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
                # An attempt whose first upload was interrupted is in no list.
                self.run.abort_uploads("", lambda file: is_of_dead_attempt(file, present, self._over))
                self._is_swept = True
        except (StorageError, RunInUseError) as error:
            self.say(f"old checkpoints could not be deleted: {error}")

    def _find_damaged(self, complete: list[str]) -> list[str]:
        """Inspect new checkpoints, and the newest again, before older ones are deleted. Return the damaged ones."""
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
                self.say(f"{str(error).rstrip('.')}; the checkpoint is ignored")
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
    """Return the checkpoints to delete: all but the newest `keep` complete ones, and unfinished ones without a writer.

    Damaged checkpoints are deleted, and do not count toward `keep`. Needed ones (just written, restored from, the best)
    are kept whatever their step. If no good one is left, nothing is deleted.

    An unfinished checkpoint has no writer when its attempt is over, or when it is older than the newest complete one
    and belongs to another attempt.

    Args:
        names: the names of all folders.
        complete: folders with a manifest.
        keep: how many complete checkpoints are kept.
        attempt: the present attempt.
        damaged: complete checkpoints that cannot be restored.
        needed: complete checkpoints to keep in any case.
        over: attempts whose unfinished saves are no longer written, whatever their step.
        writing: unfinished checkpoints of these attempts that are still being written.
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
