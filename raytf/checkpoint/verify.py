"""Inspection of a run's checkpoints without restoring any: which are whole, damaged or unfinished.

`inspect` compares the sizes of the files with the manifest; `verify` also reads every byte. Neither changes anything.
Both may work on a live run, whose retention deletes checkpoints while they read.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from raytf.checkpoint import durable, manifest, naming
from raytf.checkpoint.manifest import FOLDER, CheckpointDocument
from raytf.errors import CheckpointError, RunMismatchError, StorageError
from raytf.storage.storage import Storage

#: Shares that are read concurrently; each is in memory as a whole.
_READERS = 2


class Worth(enum.Enum):
    """The condition of a checkpoint's folder."""

    WHOLE = "whole"
    DAMAGED = "damaged"
    NEWER = "newer"  # written by a newer raytf; only that version can check it
    UNFINISHED = "unfinished"  # no manifest: in progress, or left by an interrupted save


@dataclass(frozen=True)
class CheckpointFinding:
    """The result of inspecting one checkpoint.

    Attributes:
        name: its folder.
        step: number of global steps done, from its name.
        bytes: total size of its files.
        problems: descriptions of the damage; empty if there is none.
        document: the document in its manifest; empty if it cannot be read.
    """

    name: str
    step: int
    state: Worth
    bytes: int
    problems: tuple[str, ...]
    document: CheckpointDocument = field(default_factory=CheckpointDocument)


def inspect(run: Storage) -> list[CheckpointFinding]:
    """Return findings on all checkpoints in restore order; only missing files and wrong sizes count as damage."""
    folders: dict[str, dict[str, int]] = {}
    for file in run.files(FOLDER, skipped=[]):
        name, _, inner = file.name.partition("/")
        if inner and naming.split_name(name)[0] >= 0:
            folders.setdefault(name, {})[inner] = file.bytes
    findings = (_inspect(run, name, folders[name]) for name in naming.restore_order(folders))
    return [finding for finding in findings if finding is not None]


def verify(run: Storage) -> list[CheckpointFinding]:
    """Inspect all checkpoints as `inspect` does, and read and decode every byte of every share.

    Raises:
        StorageError: storage refuses a request.
    """
    verified = []
    for seen in inspect(run):
        finding: CheckpointFinding | None = seen
        if seen.state is Worth.WHOLE:
            finding = _read(run, seen)
        if finding is not None:
            verified.append(finding)
    return verified


def restorable(findings: list[CheckpointFinding]) -> CheckpointFinding | None:
    """Return the checkpoint that a resume would restore; None if there is none."""
    whole = {finding.name: finding for finding in findings if finding.state is Worth.WHOLE}
    order = naming.restore_order(whole)
    return whole[order[0]] if order else None


def _inspect(run: Storage, name: str, sizes: Mapping[str, int]) -> CheckpointFinding | None:
    """Return the finding on a checkpoint from the sizes of its files; None if it is being deleted."""
    step, total = naming.split_name(name)[0], sum(sizes.values())
    if manifest.FILE not in sizes:
        return CheckpointFinding(name, step, Worth.UNFINISHED, total, ())
    try:
        body = manifest.read(run, name)
    except CheckpointError as error:
        problem = str(error).removeprefix(f"checkpoint {name}: ").rstrip(".")
        return CheckpointFinding(name, step, Worth.DAMAGED, total, (problem,))
    except RunMismatchError as error:
        newer = str(error).partition(" was ")[2].rstrip(".")
        return CheckpointFinding(name, step, Worth.NEWER, total, (newer,))
    except StorageError as error:
        if error.kind == "missing":
            return None
        if error.kind != "denied":
            raise
        denied = f"{manifest.FILE} cannot be read: access is denied"
        return CheckpointFinding(name, step, Worth.DAMAGED, total, (denied,))
    problems = manifest.size_problems(body["shares"], sizes)
    if problems and not run.exists(f"{FOLDER}/{name}/{manifest.FILE}"):
        return None
    state = Worth.DAMAGED if problems else Worth.WHOLE
    return CheckpointFinding(name, step, state, total, tuple(problems), CheckpointDocument.parse(body["document"]))


def _read(run: Storage, seen: CheckpointFinding) -> CheckpointFinding | None:
    """Return the finding on a checkpoint after reading every byte; None if it is being deleted."""
    try:
        shares = manifest.read(run, seen.name)["shares"]
    except CheckpointError as error:  # damaged since `inspect` read it
        return CheckpointFinding(seen.name, seen.step, Worth.DAMAGED, seen.bytes, (str(error),), seen.document)
    except StorageError as error:
        if error.kind == "missing":
            return None
        raise

    def check(share: dict[str, Any]) -> str | None:
        try:
            names = sorted(durable.read_share(run, seen.name, share))
        except CheckpointError as error:
            return str(error).rstrip(".")
        except StorageError as error:
            if error.kind != "denied":
                raise
            return f"{share['file']} cannot be read: access is denied"
        return None if names == share["names"] else f"{share['file']} holds other tensors than the manifest lists"

    with ThreadPoolExecutor(_READERS) as pool:
        problems = tuple(p for p in pool.map(check, shares) if p is not None)
    if not problems:
        return seen
    if not run.exists(f"{FOLDER}/{seen.name}/{manifest.FILE}"):
        return None
    return CheckpointFinding(seen.name, seen.step, Worth.DAMAGED, seen.bytes, problems, seen.document)
