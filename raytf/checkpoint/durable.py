"""The durable tier: checkpoints on storage, written in parallel, visible only when complete.

    checkpoints/000000000400-20261121T101500-3f2a/
        share-00000.safetensors   the tensors that rank 0 wrote
        share-00000.json          its size, CRC-32 and names
        ...
        MANIFEST.json             written last: step, number of shares, each one's size and CRC-32, and the document

A folder without a manifest is no checkpoint. Each attempt (each start of a worker group) writes folders of its own.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from raytf.checkpoint import codec, manifest, policy
from raytf.checkpoint.manifest import FOLDER, Checkpoint
from raytf.errors import CheckpointError, StorageError
from raytf.storage import Storage


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
            data = run.get(file)
        except StorageError as error:
            if error.kind == "missing":
                raise CheckpointError(f"checkpoint {name}: {share['file']} is missing.") from error
            raise
        if len(data) != share["bytes"] or zlib.crc32(data) != share["crc32"]:
            raise CheckpointError(
                f"checkpoint {name}: {share['file']} is damaged "
                f"({len(data)} of {share['bytes']} bytes, or a wrong checksum)."
            )
        return codec.decode(data)

    with ThreadPoolExecutor(max(1, min(8, len(body["shares"])))) as pool:
        parts = list(pool.map(read, body["shares"]))
    tensors = {key: value for part in parts for key, value in part.items()}
    return Checkpoint(name, body["step"], body["document"], tensors)


class Saver:
    """Writes this rank's part of checkpoints in the background; one save at a time.

    The ranks agree on every transition through `policy.advance`; this class only does the writing and says, as
    `votes`, how far it is.

    Args:
        run: the run's folder.
        rank, world_size: of this worker.
        attempt: name of this start of the worker group.
        keep: complete checkpoints that stay.
        say: told about failures.
        restored: the checkpoint that this attempt began from; it stays until a newer one is complete.
        damaged: checkpoints that could not be restored.
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
    ):
        self._run, self._rank, self._world_size, self._attempt = run, rank, world_size, attempt
        self._keep, self._say = keep, say
        self._needed, self._damaged = [] if restored is None else [restored], list(damaged)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="raytf-save")
        self._job: Future[None] | None = None
        self.phase = policy.Phase.IDLE
        self.name = ""
        self._serial = 0
        self._document: dict[str, Any] = {}

    def votes(self) -> policy.Votes:
        """This rank's part of the votes about the save under way."""
        if self._job is None or not self._job.done():
            return policy.Votes()
        if self.failure is not None:
            return policy.Votes(failed=1)
        if self.phase is policy.Phase.WRITING:
            return policy.Votes(written=1)
        return policy.Votes(committed=float(self._rank == 0))

    @property
    def failure(self) -> str | None:
        """Why the last part of a save failed on this rank; None where it did not, or is under way."""
        error = self._job.exception() if self._job is not None and self._job.done() else None
        return None if error is None else str(error) or type(error).__name__

    def begin(
        self,
        step: int,
        tensors: dict[str, np.ndarray],
        document: dict[str, Any],
        finite: Collection[str] = (),
        first: Callable[[], None] = lambda: None,
    ) -> None:
        """Start to write this rank's share of the state after `step`.

        Args:
            tensors: this rank's share; must not change any more.
            document: kept by rank 0, for the manifest.
            finite: names of tensors that must hold no NaN and no infinity: a broken state is not worth keeping.
            first: what must be on storage before the checkpoint is.
        """
        self._serial += 1
        self.name, self._document = policy.name_of(step, self._attempt, self._serial), document
        name = self.name

        def work() -> None:
            first()
            self._write_share(name, tensors, finite)

        self._job = self._pool.submit(self._told, work)

    def commit(self, step: int) -> None:
        """All shares are written: rank 0 makes the checkpoint visible and deletes what retention lets go."""
        if self._rank == 0:
            name, document = self.name, self._document
            self._job = self._pool.submit(self._told, lambda: self._write_manifest(name, step, document))

    def drop(self) -> None:
        """The save failed somewhere: remove what rank 0 can find of it, in the background."""
        name = self.name
        if self._rank == 0:
            self._pool.submit(self._remove, name)

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _remove(self, name: str) -> None:
        with contextlib.suppress(StorageError):  # what stays is no checkpoint, and retention finds it later
            self._run.delete(f"{FOLDER}/{name}")

    def _told(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # it stays in the future, where `failure` finds it: training goes on
            self._say(f"rank {self._rank}: {str(error) or type(error).__name__}")
            raise

    def _write_share(self, name: str, tensors: dict[str, np.ndarray], finite: Collection[str]) -> None:
        bad = [n for n in tensors if n in finite and not np.isfinite(tensors[n]).all()]
        if bad:
            raise CheckpointError(f"{bad[0]} holds NaN or infinite values; such a state is not saved.")
        data = codec.encode(tensors)
        file = f"share-{self._rank:05d}"
        self._run.put(f"{FOLDER}/{name}/{file}.safetensors", data)
        share = {"file": f"{file}.safetensors", "bytes": len(data), "crc32": zlib.crc32(data), "names": sorted(tensors)}
        self._run.put(f"{FOLDER}/{name}/{file}.json", manifest.dump(share))

    def _write_manifest(self, name: str, step: int, document: dict[str, Any]) -> None:
        folder = f"{FOLDER}/{name}"
        shares = [json.loads(self._run.get(f"{folder}/share-{r:05d}.json")) for r in range(self._world_size)]
        manifest.write(self._run, name, step, shares, document)
        self._needed = [name]
        self._retain()

    def _retain(self) -> None:
        try:
            names = [n.rstrip("/") for n in self._run.list(FOLDER) if n.endswith("/")]
            complete = manifest.list_complete(self._run)
            for old in policy.to_delete(names, complete, self._keep, self._attempt, self._damaged, self._needed):
                # The manifest goes first: a deletion cut short leaves no checkpoint that looks complete.
                self._run.delete(f"{FOLDER}/{old}/{manifest.FILE}")
                self._run.delete(f"{FOLDER}/{old}")
        except StorageError as error:
            self._say(f"old checkpoints could not be deleted: {error}")
