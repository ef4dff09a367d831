"""The durable tier: checkpoints on storage, written in parallel, visible only when complete.

    checkpoints/000000000400-a000001.000003-20261121T101500.123-3f2a9c-0001/
        share-00000.safetensors   the tensors that rank 0 wrote
        share-00000.json          its size, CRC-32C and names
        ...
        MANIFEST.json             written last: step, number of shares, each one's size and CRC-32C, and the document

If there are more ranks than tensors, the last ranks have no tensors and write nothing. A folder without a manifest is
not a checkpoint. Each attempt (each start of a worker group) writes its own folders.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raytf._process import in_thread
from raytf.checkpoint import codec, manifest, naming
from raytf.checkpoint.cleanup import Cleanup, Keep
from raytf.checkpoint.commit import Phase, Votes
from raytf.checkpoint.manifest import FOLDER, Checkpoint, CheckpointDocument, ManifestLink
from raytf.checkpoint.naming import GroupAttempt
from raytf.errors import CheckpointError, DamagedFileError, StorageError
from raytf.storage.storage import Storage

#: With this many abandoned writes that still hang, no new save is started.
_MOST_LINGERING = 2
#: Small files that rank 0 reads concurrently for a manifest. One by one, those of 500 ranks would take 10 s from S3.
_READS = 16
#: Seconds that a save may take, or how many times as long as the last good one, whichever is longer.
DEADLINE_SECONDS, DEADLINE_FACTOR = 120.0, 10.0


def deadline(good_seconds: float) -> float:
    """Return the seconds after which a save is given up. The last good one took `good_seconds`; 0 if there is none."""
    return max(DEADLINE_SECONDS, DEADLINE_FACTOR * good_seconds)


def load(run: Storage, name: str) -> Checkpoint:
    """Read a checkpoint and verify every byte of it.

    Raises:
        CheckpointError: the checkpoint is damaged or incomplete.
        StorageError: storage fails.
    """
    body = manifest.read(run, name)
    try:
        with ThreadPoolExecutor(max(1, min(8, len(body["shares"])))) as pool:
            parts = list(pool.map(lambda share: read_share(run, name, share), body["shares"]))
    except CheckpointError as error:
        raise CheckpointError(f"checkpoint {name} is damaged: {str(error).rstrip('.')}.") from error
    tensors = {key: value for part in parts for key, value in part.items()}
    return Checkpoint(name, body["step"], CheckpointDocument.parse(body["document"]), tensors)


def read_share(run: Storage, name: str, share: dict[str, Any]) -> dict[str, np.ndarray]:
    """Read the tensors of a share and verify every byte of it.

    Args:
        share: the share's entry in the manifest.

    Raises:
        CheckpointError: the share is damaged. The message omits the checkpoint's name.
        StorageError: storage fails.
    """
    file = share["file"]
    try:
        data = run.get(f"{FOLDER}/{name}/{file}", codec.readable(share["bytes"]))
    except DamagedFileError as error:
        raise CheckpointError(f"{file}: {error.reason}") from error
    except StorageError as error:
        if error.kind == "missing":
            raise CheckpointError(f"{file} is missing") from error
        raise
    if len(data) != share["bytes"]:
        raise CheckpointError(f"{file} has {len(data)} of {share['bytes']} bytes")
    if not codec.is_intact(data, share):
        raise CheckpointError(f"{file} has a wrong checksum")
    try:
        return codec.decode(data)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from error


class DurableTier:
    """Writes this rank's part of checkpoints on storage in the background, one save at a time.

    It implements `raytf.checkpoint.commit.Writing`: it writes, and votes on its progress. A part that takes longer than
    `deadline` counts as failed. The save is then given up, and its hanging thread is left behind.

    Args:
        run: the run's folder.
        attempt: this start of the worker group.
        keep: the complete checkpoints to keep.
        say: reports the first of several failures in a row.
        fence: raises if the run belongs to another owner; rank 0 calls it before it writes, commits or deletes.
        late: called, in a thread, when a part ends after its save was given up.
        commits: called on rank 0, in a thread, with the step of a checkpoint that is about to become complete.
        clock: a monotonic clock, in seconds.

    Attributes:
        good_seconds: how long the last good save took; 0 if there is none yet.
        lingers: whether this rank was still writing the last aborted save when it was aborted.
    """

    def __init__(
        self,
        run: Storage,
        attempt: GroupAttempt,
        keep: Keep,
        say: Callable[[str], None],
        fence: Callable[[], None] = lambda: None,
        late: Callable[[], None] = lambda: None,
        commits: Callable[[int], None] = lambda step: None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._run = run
        self._attempt = attempt
        self._say = say
        self._fence = fence
        self._late = late
        self._commits = commits
        self._clock = clock
        self._cleanup = Cleanup(run, attempt, keep, say, fence, self._under_way)
        #: The save under way, or the last one; when it began; and its part that is being written.
        self._writer: DurableWriter | None = None
        self._began = 0.0
        self._job: Future[None] = Future()
        #: Parts of abandoned saves that are still being written, by the folder's name.
        self._lingering: dict[str, Future[None]] = {}
        #: Folders of this attempt's failed saves.
        self._failed: list[str] = []
        self._failures = 0
        self._serial = 0
        #: On rank 0, the newest checkpoint of this attempt, and the name of the checkpoint that was restored.
        self._latest: manifest.ManifestLink | None = None
        self._restored: str | None = None
        self.good_seconds = 0.0
        self.lingers = False

    @property
    def name(self) -> str:
        return "" if self._writer is None else self._writer.name

    @property
    def failure(self) -> Exception | None:
        """Why the latest save failed on this rank; None if it did not fail, or is under way."""
        if self._writer is None:
            return None
        if self._job.done():
            error = self._job.exception()
            return error if error is None or isinstance(error, Exception) else CheckpointError(type(error).__name__)
        if self._is_late():
            seconds = deadline(self.good_seconds)
            return StorageError(
                f"{self._run.locate(FOLDER)} did not store the checkpoint within {seconds:.0f} s.", "unreachable"
            )
        return None

    def candidates(self) -> list[str]:
        """Return the names of complete checkpoints, best to restore first."""
        return manifest.list_complete(self._run)

    def delete(self, names: Sequence[str], why: str) -> None:
        """Delete checkpoints, and report why. Only rank 0 calls this."""
        self._fence()
        for name in names:
            manifest.delete(self._run, name)
            self._say(f"checkpoint {name} is deleted: {why}")

    def load(self, candidate: str) -> Checkpoint:
        """Read a checkpoint from which training can continue, and verify every byte of it.

        Raises:
            CheckpointError: the checkpoint is damaged or incomplete.
            StorageError: storage fails.
        """
        checkpoint = load(self._run, candidate)
        if checkpoint.document.missing:
            raise CheckpointError(
                f"checkpoint {candidate}: the manifest's document has no {checkpoint.document.missing[0]!r}."
            )
        return checkpoint

    def locate(self) -> str:
        return self._run.locate(FOLDER)

    def continue_from(self, restored: str | None, damaged: Collection[str]) -> None:
        """Keep the restored checkpoint until a newer one is complete. The next cleanup deletes the damaged ones."""
        self._restored = restored
        self._cleanup.continue_from(restored, damaged)

    def begin(self, save: DurableSave) -> None:
        self._serial += 1
        name = naming.name_of(save.step, self._attempt.name, self._serial)
        writers = save.writers or self._attempt.world_size
        asked = self._fence, self._commits, self._predecessor
        self._writer = writer = DurableWriter(self._run, name, self._attempt.rank, writers, save, *asked)
        self._began = self._clock()
        self._lingering = {name: job for name, job in self._lingering.items() if not job.done()}
        if len(self._lingering) >= _MOST_LINGERING:  # each holds a share in memory
            self._job = Future()
            self._job.set_exception(
                StorageError(
                    f"{self._run.locate(FOLDER)}: {len(self._lingering)} earlier writes still hang.", "unreachable"
                )
            )
            return
        self._job = self._start(writer, writer.write_share)

    def vote(self, phase: Phase) -> Votes:
        if self._writer is None:
            return Votes()
        if not self._job.done():
            return Votes(failed=float(self._is_late()))
        if self._job.exception() is not None:
            return Votes(failed=1)
        if phase is Phase.WRITING:
            return Votes(written=1)
        return Votes(committed=float(self._attempt.rank == 0))

    def commit(self) -> None:
        """Make the checkpoint visible on rank 0, in the background, now that all shares are written."""
        writer = self._writer
        if self._attempt.rank == 0 and writer is not None:
            self._job = self._start(writer, writer.write_manifest)

    def done(self) -> None:
        """Record that the checkpoint is complete. Rank 0 starts to delete the checkpoints that it replaces."""
        if self._writer is None:
            return
        self.good_seconds, self._failures = self._clock() - self._began, 0
        if self._attempt.rank == 0:
            self._latest = self._writer.link
            self._cleanup.completed(self._writer.name)

    def abort(self) -> None:
        """Abandon a save that failed on some rank. Rank 0 removes its files in the background."""
        assert self._writer is not None
        failure, rank = self.failure, self._attempt.rank
        if failure is not None and not self._failures:
            self._say(f"rank {rank}: {str(failure) or type(failure).__name__}")
        self._failures += 1
        self._writer.given_up.set()
        self.lingers = not self._job.done()
        if self.lingers:
            self._lingering[self._writer.name] = self._job
        if rank == 0:
            self._failed = [*self._failed[1 - _MOST_LINGERING :], self._writer.name]
            self._cleanup.remove([name for name in self._failed if name not in self._lingering])

    def drop(self) -> None:
        """Give up the save under way, because the ranks start anew."""
        if self._writer is not None:
            self._writer.given_up.set()

    def settle(self, seconds: float) -> None:
        """Wait until old checkpoints are deleted, but at most `seconds`."""
        self._cleanup.settle(seconds)

    def _predecessor(self, step: int) -> manifest.ManifestLink | None:
        """Return the checkpoint of this run before that of `step`; None if there is none that can be read."""
        if self._latest is not None:
            return self._latest
        with contextlib.suppress(StorageError, DamagedFileError):
            earlier = [name for name in manifest.list_complete(self._run) if naming.split_name(name)[0] <= step]
            name = self._restored or next(iter(earlier), None)
            return None if name is None else manifest.link(self._run, name)
        return None

    def _under_way(self) -> list[str]:
        """Return the names of the checkpoints that this rank is writing, including abandoned ones."""
        writing = [name for name, job in dict(self._lingering).items() if not job.done()]
        writer = self._writer
        return writing if writer is None or writer.given_up.is_set() else [*writing, writer.name]

    def _is_late(self) -> bool:
        return self._clock() - self._began > deadline(self.good_seconds)

    def _start(self, writer: DurableWriter, work: Callable[[], None]) -> Future[None]:
        job = in_thread(work)
        job.add_done_callback(lambda _: self._late() if writer.given_up.is_set() else None)
        return job


@dataclass(frozen=True)
class DurableSave:
    """The part of a state that a rank writes.

    Attributes:
        step: global steps that the state has seen.
        tensors: this rank's share, which must not change any more.
        document: rank 0's document for the manifest.
        finite: names of tensors that must have no NaN and no infinity, because a broken state is not worth keeping.
        before: called first in the writing thread, to write files that must be on storage before the checkpoint is.
        writers: how many ranks, from the first, have tensors; None for all.
    """

    step: int
    tensors: dict[str, np.ndarray]
    document: CheckpointDocument = field(default_factory=CheckpointDocument)
    finite: Collection[str] = ()
    before: Callable[[], None] = lambda: None
    writers: int | None = None


@dataclass(frozen=True)
class PreparedSave(DurableSave):
    """A copy of the state that can be saved now or later.

    Attributes:
        made_at: the time of the copy, in seconds of the Checkpointer's clock.
        filling: done when the tensors have their values.
    """

    made_at: float = 0.0
    filling: Future[None] = field(default_factory=Future)


@dataclass(eq=False)
class DurableWriter:
    """Writes this rank's part of one save, even after the save was given up.

    Attributes:
        run: the run's folder.
        name: the checkpoint's folder.
        rank: this worker's rank.
        writers: how many ranks, from the first, have a share.
        save: the data to write.
        fence: raises if the run belongs to another owner; rank 0 calls it before it writes and commits.
        commits: called on rank 0 with the step before the manifest is written.
        before: returns the link to the checkpoint before this one, for the manifest; called on rank 0.
        link: the link to this checkpoint, for the next manifest; None until rank 0 has written this manifest.
        given_up: set once the ranks have agreed that the save failed, and must not become a checkpoint.
    """

    run: Storage
    name: str
    rank: int
    writers: int
    save: DurableSave
    fence: Callable[[], None]
    commits: Callable[[int], None]
    before: Callable[[int], ManifestLink | None] = lambda step: None
    link: ManifestLink | None = None
    given_up: threading.Event = field(default_factory=threading.Event)

    def write_share(self) -> None:
        """Call `save.before`, and write this rank's share of the tensors.

        Raises:
            CheckpointError: the save was given up, or a tensor that must be finite is not.
            StorageError: storage fails.
            RunInUseError: the run belongs to another owner.
        """
        if self.rank == 0:
            self.fence()
        self.save.before()
        self._check()
        tensors = self.save.tensors
        if not tensors and self.rank >= self.writers:
            return
        pieces = codec.parts(tensors)
        # In parallel to the writing, which mostly waits for the disk or the network.
        checks = in_thread(lambda: _checksum(pieces, tensors, self.save.finite), "raytf-check")
        file = f"share-{self.rank:05d}"
        self.run.put(f"{FOLDER}/{self.name}/{file}.safetensors", pieces)
        share = {
            "file": f"{file}.safetensors",
            "bytes": sum(piece.nbytes for piece in pieces),
            "crc32c": checks.result(),
            "names": sorted(tensors),
        }
        self.run.put(f"{FOLDER}/{self.name}/{file}.json", manifest.dump(share))

    def write_manifest(self) -> None:
        """Make the checkpoint visible on rank 0, after all shares are written.

        Raises:
            CheckpointError: the save was given up, or was deleted while it was written.
            StorageError: storage fails.
            RunInUseError: the run belongs to another owner, or to later workers.
        """
        folder = f"{FOLDER}/{self.name}"
        files = [f"{folder}/share-{rank:05d}.json" for rank in range(self.writers)]
        with ThreadPoolExecutor(min(_READS, len(files))) as pool:
            shares = [json.loads(data) for data in pool.map(self.run.get, files)]
        before = self.before(self.save.step)
        self.fence()
        self.commits(self.save.step)
        self._check()
        document = self.save.document.of_manifest()
        self.link = manifest.write(self.run, self.name, self.save.step, shares, document, before)
        # This process may have been suspended before it wrote the manifest, while others deleted the folder.
        is_whole = self.run.exists(f"{folder}/{shares[0]['file']}")
        if is_whole and self.given_up.is_set():
            self.fence()  # a new owner of the run may already have restored this checkpoint
        if self.given_up.is_set() or not is_whole:
            manifest.delete(self.run, self.name)
        self._check()
        if not is_whole:
            raise CheckpointError(f"the save of step {self.save.step} was deleted while it was written.")

    def _check(self) -> None:
        if self.given_up.is_set():
            raise CheckpointError(f"the save of step {self.save.step} was given up.")


def _checksum(pieces: Sequence[memoryview], tensors: dict[str, np.ndarray], finite: Collection[str]) -> int:
    """Return the checksum of a share.

    Raises:
        CheckpointError: a tensor that must be finite is not.
    """
    bad = codec.broken(tensors, (name for name in tensors if name in finite))
    if bad is not None:
        raise CheckpointError(f"{bad} has NaN or infinite values, and such a state is not saved.")
    return codec.checksum(pieces)
