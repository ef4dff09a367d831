"""The manifest that makes a folder a checkpoint: which there are, and what one says. No tensors and no Keras here."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raytf.checkpoint import policy
from raytf.errors import CheckpointError, RunMismatchError
from raytf.storage import Storage

FOLDER = "checkpoints"
FILE = "MANIFEST.json"
#: Changed when older raytf could not read what newer raytf writes.
VERSION = 2


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified.

    Attributes:
        name: its folder, or what else a person may call it.
        step: global steps that it has seen.
        document: the JSON document saved with it.
        tensors: by name.
        is_in_memory: it is a snapshot of nodes' memory, not on storage.
    """

    name: str
    step: int
    document: dict[str, Any]
    tensors: dict[str, np.ndarray]
    is_in_memory: bool = False


def list_complete(run: Storage) -> list[str]:
    """Names of checkpoints that have a manifest, newest first."""
    # One list of all files: to look each folder up would cost a request for each that was ever left unfinished.
    names = [f.name.removesuffix(f"/{FILE}") for f in run.files(FOLDER) if f.name.endswith(f"/{FILE}")]
    return policy.restore_order([n for n in names if "/" not in n and policy.split_name(n)[0] >= 0])


def dump(document: dict[str, Any]) -> bytes:
    """JSON with one spelling for a value, so that equal documents are equal bytes."""
    return json.dumps(document, sort_keys=True, indent=1).encode()


def write(run: Storage, name: str, step: int, shares: list[dict[str, Any]], document: dict[str, Any]) -> None:
    """Make a checkpoint visible; its shares must be on storage already."""
    # Through JSON once, so that the checksum is over what a reader will have.
    body = json.loads(dump({"version": VERSION, "step": step, "shares": shares, "document": document}))
    run.put(f"{FOLDER}/{name}/{FILE}", dump({"body": body, "crc32": zlib.crc32(dump(body))}))


def size_problems(shares: list[dict[str, Any]], sizes: Mapping[str, int]) -> list[str]:
    """What is wrong with the files of a checkpoint by their sizes alone.

    Args:
        shares: of the manifest.
        sizes: bytes of each file in the folder.
    """
    problems = []
    for share in shares:
        file, expected = share["file"], share["bytes"]
        if file not in sizes:
            problems.append(f"{file} is missing")
        elif sizes[file] != expected:
            problems.append(f"{file} has {sizes[file]} of {expected} bytes")
    return problems


def read(run: Storage, name: str) -> dict[str, Any]:
    """step, shares and document of a checkpoint.

    Raises:
        CheckpointError: the manifest is damaged.
        RunMismatchError: it is of a newer raytf.
    """
    data = run.get(f"{FOLDER}/{name}/{FILE}")
    try:
        manifest = json.loads(data)
        body, crc = manifest["body"], manifest["crc32"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"checkpoint {name}: the manifest cannot be read ({error}).") from error
    if zlib.crc32(dump(body)) != crc:
        raise CheckpointError(f"checkpoint {name}: the manifest's checksum is wrong.")
    if not isinstance(body, dict) or not isinstance(body.get("version"), int):
        raise CheckpointError(f"checkpoint {name}: the manifest cannot be read (no version).")
    if body["version"] > VERSION:
        raise RunMismatchError(
            f"checkpoint {name} was written by a newer raytf (format {body['version']}; this one reads up to "
            f"{VERSION}). Update raytf."
        )
    wrong = _wrong_field(body)
    if wrong:
        raise CheckpointError(f"checkpoint {name}: the manifest cannot be read ({wrong}).")
    if body["step"] != policy.split_name(name)[0]:
        raise CheckpointError(f"checkpoint {name}: the manifest is that of another checkpoint, of step {body['step']}.")
    return body


def _wrong_field(body: dict[str, Any]) -> str | None:
    kinds = {"step": int, "shares": list, "document": dict}
    for field, kind in kinds.items():
        if not isinstance(body.get(field), kind):
            return f"{field} is no {kind.__name__}"
    crc = "crc32" if body["version"] == 1 else "crc32c"
    parts = {"file": str, "bytes": int, crc: int, "names": list}
    for share in body["shares"]:
        if not isinstance(share, dict) or not all(isinstance(share.get(part), kind) for part, kind in parts.items()):
            return f"a share without file, bytes, {crc} or names"
    return None
