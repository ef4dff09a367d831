"""The durable tier: checkpoints on storage, written in parallel, visible only when complete.

    checkpoints/000000000400-20261121T101500-3f2a/
        share-00000.safetensors   the tensors that rank 0 wrote
        share-00000.json          its size, CRC-32C and names
        ...
        MANIFEST.json             written last: step, number of shares, each one's size and CRC-32C, and the document

Where there are more ranks than tensors, the last ones have none and write nothing. A folder without a manifest is no
checkpoint. Each attempt (each start of a worker group) writes folders of its own.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from raytf._process import in_thread
from raytf.checkpoint import cadence, codec, commit, manifest, naming, retention
from raytf.checkpoint.manifest import FOLDER, Checkpoint
from raytf.checkpoint.naming import is_of_dead_attempt
from raytf.config.objective import Goal
from raytf.errors import CheckpointError, DamagedFileError, RunInUseError, RunMismatchError, StorageError
from raytf.storage.storage import Storage

#: Parts of saves that were given up and hang; with so many, no new one is begun.
_MOST_LINGERING = 2
#: Small files that rank 0 reads at once for a manifest: one after another, those of 500 ranks would take S3 10 s.
_READS = 16


def load(run: Storage, name: str) -> Checkpoint:
    """Read a checkpoint and verify every byte of it.

    Raises:
        CheckpointError: it is damaged or incomplete.
        StorageError: storage refuses.
    """
    body = manifest.read(run, name)

    def read(share: dict[str, Any]) -> dict[str, np.ndarray]:
        file = f"{FOLDER}/{name}/{share['file']}"
        try:
            data = run.get(file, codec.readable(share["bytes"]))
        except DamagedFileError as error:
            raise CheckpointError(f"checkpoint {name}: {share['file']} is damaged: {error.reason}.") from error
        except StorageError as error:
            if error.kind == "missing":
                raise CheckpointError(f"checkpoint {name}: {share['file']} is missing.") from error
            raise
        if len(data) != share["bytes"] or not codec.is_intact(data, share):
            raise CheckpointError(
                f"checkpoint {name}: {share['file']} is damaged "
                f"({len(data)} of {share['bytes']} bytes, or a wrong checksum)."
            )
        return codec.decode(data)

    with ThreadPoolExecutor(max(1, min(8, len(body["shares"])))) as pool:
        parts = list(pool.map(read, body["shares"]))
    tensors = {key: value for part in parts for key, value in part.items()}
    return Checkpoint(name, body["step"], body["document"], tensors)


class _Save:
    """One save of this rank, also after it was given up.

    Attributes:
        writers: ranks that have a share, the first ones.
        given_up: set once the ranks have agreed that it failed; what is written later makes it no checkpoint.
    """

    def __init__(self, name: str, step: int, document: dict[str, Any], began: float, writers: int):
        self.name, self.step, self.document, self.began, self.writers = name, step, document, began, writers
        self.given_up = threading.Event()

    def check(self) -> None:
        if self.given_up.is_set():
            raise CheckpointError(f"the save of step {self.step} was given up.")


class Saver:
    """Writes this rank's part of checkpoints in the background; one save at a time.

    The ranks agree on every transition through `policy.advance`; this class only does the writing and says, as
    `votes`, how far it is. A part that takes longer than `policy.deadline` counts as failed: the save is given up, and
    what hangs is left to itself.

    Args:
        run: the run's folder.
        rank, world_size: of this worker.
        attempt: name of this start of the worker group.
        keep: complete checkpoints that stay.
        say: told about failures, the first in a row.
        restored: the checkpoint that this attempt began from; it stays until a newer one is complete.
        damaged: checkpoints that could not be restored.
        goal: whose best checkpoint stays too.
        over: attempts before this one, of which nobody writes any more.
        fence: raises where the run belongs to another owner; rank 0 asks before it writes, commits or deletes.
        late: called, in a thread, when a part ends after its save was given up.
        clock: injected by tests.

    Attributes:
        phase: of the save under way.
        good_seconds: that the last good save took; 0 for none yet.
    """

    def __init__(
        self,
        run: Storage,
        rank: int,
        world_size: int,
        attempt: str,
        keep: int,
        say: Callable[[str], None],
        restored: str | None = None,
        damaged: Collection[str] = (),
        goal: Goal | None = None,
        over: Collection[str] = (),
        fence: Callable[[], None] = lambda: None,
        late: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._run, self._rank, self._world_size, self._attempt = run, rank, world_size, attempt
        self._keep, self._say, self._late, self._clock = keep, say, late, clock
        self._goal, self._over, self._fence = goal, {attempt, *over}, fence
        #: Checkpoints that were looked at, with the metric's value.
        self._values: dict[str, float | None] = {}
        self._swept = False
        self._needed, self._damaged = [] if restored is None else [restored], list(damaged)
        self._save: _Save | None = None
        self._job: Future[None] = Future()
        #: Parts of saves that were given up and are still being written, by the folder's name.
        self._lingering: dict[str, Future[None]] = {}
        #: Folders of this attempt's saves that failed, and the thread that removes them.
        self._failed: list[str] = []
        self._removal: Future[None] | None = None
        #: Set where retention has something to look at, and the thread that does.
        self._is_retention_due = threading.Event()
        self._retention: Future[None] | None = None
        self._failures = 0
        self.good_seconds = 0.0
        self.phase = commit.Phase.IDLE
        self._serial = 0

    @property
    def name(self) -> str:
        """The folder of the latest save."""
        return "" if self._save is None else self._save.name

    def votes(self) -> commit.Votes:
        """This rank's part of the votes about the save under way."""
        if self._save is None:
            return commit.Votes()
        if not self._job.done():
            return commit.Votes(failed=float(self._is_late(self._save)))
        if self._job.exception() is not None:
            return commit.Votes(failed=1)
        if self.phase is commit.Phase.WRITING:
            return commit.Votes(written=1)
        return commit.Votes(committed=float(self._rank == 0))

    @property
    def failure(self) -> Exception | None:
        """Why the latest save failed on this rank; None where it did not, or is under way."""
        if self._save is None:
            return None
        if self._job.done():
            error = self._job.exception()
            return error if error is None or isinstance(error, Exception) else CheckpointError(type(error).__name__)
        if self._is_late(self._save):
            seconds = cadence.deadline(self.good_seconds)
            return StorageError(
                f"{self._run.locate(FOLDER)} did not take the checkpoint within {seconds:.0f} s.", "unreachable"
            )
        return None

    def begin(
        self,
        step: int,
        tensors: dict[str, np.ndarray],
        document: dict[str, Any],
        finite: Collection[str] = (),
        first: Callable[[], None] = lambda: None,
        writers: int | None = None,
    ) -> None:
        """Start to write this rank's share of the state after `step`.

        Args:
            tensors: this rank's share; must not change any more.
            document: kept by rank 0, for the manifest.
            finite: names of tensors that must hold no NaN and no infinity: a broken state is not worth keeping.
            first: what must be on storage before the checkpoint is.
            writers: ranks that have tensors, the first ones; by default all.
        """
        self._serial += 1
        name, writers = naming.name_of(step, self._attempt, self._serial), writers or self._world_size
        save = _Save(name, step, document, self._clock(), writers)
        self._save = save
        self._lingering = {name: job for name, job in self._lingering.items() if not job.done()}
        if len(self._lingering) >= _MOST_LINGERING:  # each holds a share in memory
            self._job = Future()
            self._job.set_exception(
                StorageError(
                    f"{self._run.locate(FOLDER)}: {len(self._lingering)} earlier writes hang still.", "unreachable"
                )
            )
            return

        def work() -> None:
            if self._rank == 0:
                self._fence()
            first()
            save.check()
            if tensors or self._rank < writers:
                self._write_share(save.name, tensors, finite)

        self._job = self._start(save, work)

    def commit(self) -> None:
        """All shares are written: rank 0 makes the checkpoint visible."""
        save = self._save
        if self._rank == 0 and save is not None:
            self._job = self._start(save, lambda: self._write_manifest(save))

    def done(self) -> None:
        """The checkpoint is complete: rank 0 begins to delete what retention lets go."""
        if self._save is None:
            return
        self.good_seconds, self._failures = self._clock() - self._save.began, 0
        if self._rank == 0:
            self._needed = [self._save.name]
            self._is_retention_due.set()
            self._begin_retention()

    def settle(self, seconds: float) -> None:
        """Wait until nothing is left for retention to do, at most so long."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._begin_retention()
            if self._retention is None or self._retention.done():
                return
            with contextlib.suppress(TimeoutError):
                self._retention.result(max(0.0, deadline - time.monotonic()))

    def drop(self) -> bool:
        """The save failed somewhere: remove what rank 0 can find of it, in the background.

        Returns:
            Whether this rank still writes.
        """
        assert self._save is not None
        failure = self.failure
        if failure is not None and not self._failures:
            self._say(f"rank {self._rank}: {str(failure) or type(failure).__name__}")
        self._failures += 1
        self._save.given_up.set()
        lingers = not self._job.done()
        if lingers:
            self._lingering[self._save.name] = self._job
        if self._rank == 0:
            self._failed = [*self._failed[1 - _MOST_LINGERING :], self._save.name]
            if self._removal is None or self._removal.done():
                names = [name for name in self._failed if name not in self._lingering]
                self._removal = in_thread(lambda: self._remove(names))
        return lingers

    def _begin_retention(self) -> None:
        # Not a part of the save: a checkpoint counts although its store may be slow to delete others.
        if self._is_retention_due.is_set() and (self._retention is None or self._retention.done()):
            self._retention = in_thread(self._retain_while_due)

    def _is_late(self, save: _Save) -> bool:
        return self._clock() - save.began > cadence.deadline(self.good_seconds)

    def _start(self, save: _Save, work: Callable[[], None]) -> Future[None]:
        job = in_thread(work)
        job.add_done_callback(lambda _: self._late() if save.given_up.is_set() else None)
        return job

    def _remove(self, names: Collection[str]) -> None:
        with contextlib.suppress(StorageError):  # what stays is no checkpoint, and retention finds it later
            for name in names:
                # One that was given up in the moment in which it became complete is as good as any.
                if not self._run.exists(f"{FOLDER}/{name}/{manifest.FILE}"):
                    self._delete(name)

    def _delete(self, name: str) -> None:
        # The manifest goes first: a deletion cut short leaves no checkpoint that looks complete.
        self._run.delete(f"{FOLDER}/{name}/{manifest.FILE}")
        self._run.delete(f"{FOLDER}/{name}")

    def _write_share(self, name: str, tensors: dict[str, np.ndarray], finite: Collection[str]) -> None:
        pieces = codec.parts(tensors)
        # Beside the writing, which waits for the disk or the network most of the time.
        checks = in_thread(lambda: _check(pieces, tensors, finite), "raytf-check")
        file = f"share-{self._rank:05d}"
        self._run.put(f"{FOLDER}/{name}/{file}.safetensors", pieces)
        share = {
            "file": f"{file}.safetensors",
            "bytes": sum(piece.nbytes for piece in pieces),
            "crc32c": checks.result(),
            "names": sorted(tensors),
        }
        self._run.put(f"{FOLDER}/{name}/{file}.json", manifest.dump(share))

    def _write_manifest(self, save: _Save) -> None:
        folder = f"{FOLDER}/{save.name}"
        files = [f"{folder}/share-{rank:05d}.json" for rank in range(save.writers)]
        with ThreadPoolExecutor(min(_READS, len(files))) as pool:
            shares = [json.loads(data) for data in pool.map(self._run.get, files)]
        self._fence()
        save.check()
        manifest.write(self._run, save.name, save.step, shares, save.document)
        if save.given_up.is_set():
            self._delete(save.name)
        save.check()

    def _retain_while_due(self) -> None:
        while self._is_retention_due.is_set():
            self._is_retention_due.clear()
            self._retain()

    def _retain(self) -> None:
        try:
            names = [n.rstrip("/") for n in self._run.list(FOLDER) if n.endswith("/")]
            # Between the two lists: a folder of the first that is under way no more is complete in the second.
            writing = [name for name, job in dict(self._lingering).items() if not job.done()]
            if self._save is not None and not self._save.given_up.is_set():
                writing.append(self._save.name)
            complete = manifest.list_complete(self._run)
            damaged = {*self._damaged, *self._look(complete)}
            needed = set(self._needed)
            if self._goal is not None:
                best = self._goal.best({n: self._values.get(n) for n in complete if n not in damaged})
                needed |= set() if best is None else {best}
            self._fence()
            for old in retention.to_delete(
                names, complete, self._keep, self._attempt, damaged, needed, self._over, writing
            ):
                self._delete(old)
            if not self._swept:
                # An attempt whose very first file was cut off is in no list.
                self._run.abort_uploads("", lambda file: is_of_dead_attempt(file, self._attempt, self._over))
                self._swept = True
        except (StorageError, RunInUseError) as error:
            self._say(f"old checkpoints could not be deleted: {error}")

    def _look(self, complete: list[str]) -> list[str]:
        """Look at complete checkpoints, the newest again and again, before others go; those that are damaged."""
        damaged = []
        for name in complete:
            if name in self._damaged or (name in self._values and name != complete[0]):
                continue
            try:
                body = manifest.read(self._run, name)
                sizes = {file.name: file.bytes for file in self._run.files(f"{FOLDER}/{name}")}
                problems = manifest.size_problems(body["shares"], sizes)
                if problems:
                    raise CheckpointError(f"checkpoint {name}: {problems[0]}")
            except CheckpointError as error:
                self._say(f"{str(error).rstrip('.')}; it counts for nothing")
                damaged.append(name)
            except RunMismatchError:
                self._values[name] = None  # a newer raytf can read it
            else:
                history = body["document"].get("history", [])
                self._values[name] = self._goal.value_at(body["step"], history) if self._goal else None
        self._values = {name: value for name, value in self._values.items() if name in complete}
        return damaged


def _check(pieces: Sequence[memoryview], tensors: dict[str, np.ndarray], finite: Collection[str]) -> int:
    """The checksum of a share.

    Raises:
        CheckpointError: a tensor that must be finite is not.
    """
    bad = codec.broken(tensors, (name for name in tensors if name in finite))
    if bad is not None:
        raise CheckpointError(f"{bad} holds NaN or infinite values; such a state is not saved.")
    return codec.checksum(pieces)
