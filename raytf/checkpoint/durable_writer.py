"""This rank's part of one save on storage: its share of the tensors, and on rank 0 the manifest."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import numpy as np

from raytf._process import in_thread
from raytf.checkpoint import codec, manifest
from raytf.checkpoint.document import CheckpointDocument
from raytf.checkpoint.manifest import FOLDER, ManifestLink
from raytf.errors import CheckpointError
from raytf.storage.storage import Storage

#: Small files that rank 0 reads at once for a manifest: one after another, those of 500 ranks would take S3 10 s.
_READS = 16


def _nothing() -> None:
    pass


@dataclass(frozen=True)
class DurableSave:
    """What a rank writes of a state.

    Attributes:
        step: global steps that the state has seen.
        tensors: this rank's share; must not change any more.
        document: kept by rank 0, for the manifest.
        finite: names of tensors that must hold no NaN and no infinity: a broken state is not worth keeping.
        before: called in the thread that writes; what must be on storage before the checkpoint is.
        writers: ranks that have tensors, the first ones; None for all.
    """

    step: int
    tensors: dict[str, np.ndarray]
    document: CheckpointDocument = field(default_factory=CheckpointDocument)
    finite: Collection[str] = ()
    before: Callable[[], None] = _nothing
    writers: int | None = None


@dataclass(frozen=True)
class PreparedSave(DurableSave):
    """A copy of the state, to be saved now or later.

    Attributes:
        made_at: time of the copy, in seconds of the Checkpointer's clock.
        filling: done when the tensors have their values.
    """

    made_at: float = 0.0
    filling: Future[None] = field(default_factory=Future)


class DurableWriter:
    """One save of this rank, also after it was given up.

    Args:
        run: the run's folder.
        name: the checkpoint's folder.
        rank: of this worker.
        writers: ranks that have a share, the first ones.
        save: what to write.
        fence: raises where the run belongs to another owner; rank 0 asks before it writes and commits.
        commits: called on rank 0 with the step before the manifest is written.
        before: the checkpoint before this one, as its manifest is to name it; asked on rank 0.

    Attributes:
        link: this checkpoint, as the one after it will name it; None until rank 0 has written its manifest.
        given_up: set once the ranks have agreed that it failed; what is written later makes it no checkpoint.
    """

    def __init__(
        self,
        run: Storage,
        name: str,
        rank: int,
        writers: int,
        save: DurableSave,
        fence: Callable[[], None],
        commits: Callable[[int], None],
        before: Callable[[int], ManifestLink | None] = lambda step: None,
    ):
        self._run = run
        self.name = name
        self._rank = rank
        self._writers = writers
        self._save = save
        self._fence = fence
        self._commits = commits
        self._before = before
        self.link: ManifestLink | None = None
        self.given_up = threading.Event()

    @property
    def step(self) -> int:
        """Global steps that the state has seen."""
        return self._save.step

    def write_share(self) -> None:
        """Write what comes first, and this rank's share of the tensors.

        Raises:
            CheckpointError: it was given up, or a tensor that must be finite is not.
            StorageError: storage refuses.
            RunInUseError: the run belongs to another owner.
        """
        if self._rank == 0:
            self._fence()
        self._save.before()
        self._check()
        tensors = self._save.tensors
        if not tensors and self._rank >= self._writers:
            return
        pieces = codec.parts(tensors)
        # Beside the writing, which waits for the disk or the network most of the time.
        checks = in_thread(lambda: _checksum(pieces, tensors, self._save.finite), "raytf-check")
        file = f"share-{self._rank:05d}"
        self._run.put(f"{FOLDER}/{self.name}/{file}.safetensors", pieces)
        share = {
            "file": f"{file}.safetensors",
            "bytes": sum(piece.nbytes for piece in pieces),
            "crc32c": checks.result(),
            "names": sorted(tensors),
        }
        self._run.put(f"{FOLDER}/{self.name}/{file}.json", manifest.dump(share))

    def write_manifest(self) -> None:
        """Make the checkpoint visible: all shares are written. Rank 0 does it.

        Raises:
            CheckpointError: it was given up, or deleted meanwhile.
            StorageError: storage refuses.
            RunInUseError: the run belongs to another owner, or to later workers.
        """
        folder = f"{FOLDER}/{self.name}"
        files = [f"{folder}/share-{rank:05d}.json" for rank in range(self._writers)]
        with ThreadPoolExecutor(min(_READS, len(files))) as pool:
            shares = [json.loads(data) for data in pool.map(self._run.get, files)]
        before = self._before(self.step)
        self._fence()
        self._commits(self.step)
        self._check()
        document = self._save.document.of_manifest()
        self.link = manifest.write(self._run, self.name, self.step, shares, document, before)
        # This process may have stood still between the last look and the manifest, while others deleted the folder.
        is_whole = self._run.exists(f"{folder}/{shares[0]['file']}")
        if is_whole and self.given_up.is_set():
            self._fence()  # who has taken the run over meanwhile may have begun from this checkpoint
        if self.given_up.is_set() or not is_whole:
            manifest.delete(self._run, self.name)
        self._check()
        if not is_whole:
            raise CheckpointError(f"the save of step {self.step} was deleted while it was written.")

    def _check(self) -> None:
        if self.given_up.is_set():
            raise CheckpointError(f"the save of step {self.step} was given up.")


def _checksum(pieces: Sequence[memoryview], tensors: dict[str, np.ndarray], finite: Collection[str]) -> int:
    """The checksum of a share.

    Raises:
        CheckpointError: a tensor that must be finite is not.
    """
    bad = codec.broken(tensors, (name for name in tensors if name in finite))
    if bad is not None:
        raise CheckpointError(f"{bad} holds NaN or infinite values; such a state is not saved.")
    return codec.checksum(pieces)
