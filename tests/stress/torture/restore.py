"""Restores for the torture: in the order and with the code of raytf's workers, from memory and from storage; then each
byte is compared. And damage, done on purpose."""

from __future__ import annotations

import mmap
import os
import random
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from raytf.checkpoint import durable, manifest, naming, slot_ledger, snapshot_slot
from raytf.checkpoint.restore import RestorePlan
from raytf.errors import CheckpointError, StorageError
from raytf.storage.storage import Storage
from tests.stress.torture.state import State

#: Restores that storage refuses are tried again so often, as new groups would.
_TRIES = 200


@dataclass(frozen=True)
class Memory:
    """Memory of the nodes, which outlives the ranks.

    Attributes:
        held: node -> (attempt, rank, path) of each slot.
    """

    held: dict[int, list[tuple[str, int, str]]] = field(default_factory=dict)

    def paths(self, attempt: str, rank: int) -> list[str]:
        return [path for held in self.held.values() for a, r, path in held if (a, r) == (attempt, rank)]

    def generations(self) -> list[slot_ledger.Generation]:
        """As keepers of the memory tier tell it."""
        found = {
            str(node): [
                slot_ledger.HeldShare(s.step, s.attempt, s.share, s.shares, s.bytes, path)
                for _, _, path in held
                if (s := snapshot_slot.head(_mapped(path))) is not None
            ]
            for node, held in self.held.items()
        }
        return slot_ledger.generations(found, None)

    def load(self, generation: slot_ledger.Generation) -> dict[str, np.ndarray]:
        """The tensors, of the first node that holds them undamaged.

        Raises:
            CheckpointError: none does.
        """
        problem = ""
        for held in generation.holders.values():
            tensors: dict[str, np.ndarray] = {}
            try:
                for share in held:
                    tensors |= snapshot_slot.parse(_mapped(share.path))[1]
                return tensors
            except CheckpointError as error:
                problem = str(error)
        raise CheckpointError(problem)

    def torn(self) -> int:
        """Slots that were written to and hold nothing whole."""
        paths = [path for held in self.held.values() for _, _, path in held]
        return sum(bool(os.stat(path).st_size) and snapshot_slot.head(_mapped(path)) is None for path in paths)


@dataclass
class Found:
    """What a restore found.

    Attributes:
        tier: new, memory or durable.
        name: of the checkpoint on storage.
        skipped: name -> why, of those that could not be restored.
        tries: that storage refused.
    """

    tier: str = "new"
    step: int = 0
    name: str = ""
    tensors: dict[str, np.ndarray] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    tries: int = 0


def restore(run: Storage, memory: Memory) -> Found:
    """The newest checkpoint that can be restored, as raytf's workers choose it.

    Raises:
        CheckpointError: there are some, and none can be.
        StorageError: storage refuses again and again.
    """
    for tries in range(_TRIES):
        try:
            found = _restore(run, memory)
            found.tries = tries
            return found
        except StorageError:
            if tries == _TRIES - 1:
                raise
            time.sleep(0.01)
    raise AssertionError


def _restore(run: Storage, memory: Memory) -> Found:
    found = Found()
    names = manifest.list_complete(run)
    for candidate in RestorePlan.of(memory.generations(), None, False).listed(names).candidates:
        try:
            if isinstance(candidate, str):
                loaded = durable.load(run, candidate)
                found.tier, found.step, found.name, found.tensors = "durable", loaded.step, candidate, loaded.tensors
            else:
                found.tensors = memory.load(candidate)
                found.tier, found.step = "memory", candidate.step
            return found
        except CheckpointError as error:
            if isinstance(candidate, str):
                found.skipped[candidate] = str(error)
    if names:
        raise CheckpointError(f"none of {len(names)} checkpoints can be restored: {found.skipped}")
    return found


def examine(run: Storage, plain: Storage, memory: Memory, size: int) -> dict[str, Any]:
    """A restore, and then all else that looks whole, byte by byte; JSON values.

    Args:
        run: as the ranks have it, with its faults.
        plain: the same without faults.
        size: of the state, bytes.

    Returns:
        tier, step, tries, skipped of the restore; `memory` and `durable`, the newest right step in each (-1: none);
        `valid`, names of right checkpoints, newest first; `bad`, what is wrong: name -> why; `left`, what kills left.
    """
    state = State(size)
    found = restore(run, memory)
    wrong = state.differs(found.step, found.tensors) if found.tier != "new" else ""
    bad = {f"restored from {found.tier}, step {found.step}": wrong} if wrong else {}
    newest = -1
    for generation in memory.generations():
        try:
            wrong = state.differs(generation.step, memory.load(generation))
        except CheckpointError as error:
            wrong = str(error)
        if wrong:
            bad[f"memory {generation.step}"] = wrong
        else:
            newest = max(newest, generation.step)
    valid = []
    for name in manifest.list_complete(plain):
        try:
            loaded = durable.load(plain, name)
            wrong = state.differs(loaded.step, loaded.tensors) or (
                "" if naming.split_name(name)[0] == loaded.step else "its name has another step"
            )
        except CheckpointError as error:
            wrong = str(error)
        if wrong:
            bad[name] = wrong
        else:
            valid.append(name)
    folders = {file.name.partition("/")[0] for file in plain.files(manifest.FOLDER)}
    return {
        "tier": found.tier,
        "step": found.step,
        "tries": found.tries,
        "skipped": found.skipped,
        "memory": newest,
        "durable": naming.split_name(valid[0])[0] if valid else -1,
        "valid": valid,
        "bad": bad,
        "torn": memory.torn(),
        "unfinished": len([f for f in folders if f not in valid and f not in bad]),
        "temporary": _temporary(plain),
    }


def damage(run: Storage, valid: list[str], seed: str) -> dict[str, Any]:
    """Harm some checkpoints, but not all; JSON values.

    Returns:
        harmed: name -> what was done; `newest`, the best that is left.
    """
    draw = random.Random(seed)
    harmed: dict[str, str] = {}
    for name in draw.sample(valid, draw.randint(1, len(valid) - 1)):
        folder = f"{manifest.FOLDER}/{name}"
        file = draw.choice([f for f in run.list(folder) if f.endswith((".safetensors", manifest.FILE))])
        kind = draw.choice(["flipped bit", "truncated file", "deleted file"])
        path = f"{folder}/{file}"
        if kind == "deleted file":
            run.delete(path)
        else:
            data = bytearray(run.get(path))
            if kind == "flipped bit":
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
            else:
                del data[draw.randrange(len(data)) :]
            run.put(path, bytes(data))
        harmed[name] = f"{kind}: {'manifest' if file == manifest.FILE else 'share'}"
    return {"harmed": harmed, "newest": next(name for name in valid if name not in harmed)}


def _mapped(path: str) -> Any:
    fd = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(fd).st_size
        return mmap.mmap(fd, size, prot=mmap.PROT_READ) if size else b""
    finally:
        os.close(fd)


def _temporary(run: Storage) -> int:
    if not run.is_local:
        return 0
    return sum(".tmp-" in file for _, _, files in os.walk(run.locate("")) for file in files)
