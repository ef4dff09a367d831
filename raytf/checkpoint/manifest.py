"""The document of a checkpoint, and the manifest that makes a folder a checkpoint."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from raytf.checkpoint import naming
from raytf.checkpoint.step_rows import StepRows
from raytf.errors import CheckpointError, DamagedFileError, RunMismatchError
from raytf.storage import untrusted_json
from raytf.storage.storage import Storage

FOLDER = "checkpoints"
FILE = "MANIFEST.json"
#: Changed when older raytf could not read what newer raytf writes.
VERSION = 2

_MANIFEST = untrusted_json.record(
    {"body": untrusted_json.record({"version": untrusted_json.whole}), "crc32": untrusted_json.whole}
)
#: Fields without which no run can continue from a checkpoint.
_NEEDED = ("identity", "history", "train_seconds", "imbalance_seconds", "stopped_early", "callbacks")


#: A file in the checkpoint's own folder.
_file = untrusted_json.expect(
    "the name of a file",
    lambda value: isinstance(value, str) and value not in ("", ".", "..") and not set(value) & set("/\\\0"),
)
_best = untrusted_json.expect(
    "a metric with its value",
    lambda value: (
        isinstance(value, list)
        and len(value) == 2
        and not (untrusted_json.text(value[0]) or untrusted_json.number(value[1]))
    ),
)
_hexadecimal = untrusted_json.expect(
    "bytes in hexadecimal digits",
    lambda value: isinstance(value, str) and len(value) % 2 == 0 and not set(value) - set("0123456789abcdef"),
)


_DOCUMENT = untrusted_json.record(
    {},
    {
        "identity": untrusted_json.values(untrusted_json.text),
        "history": untrusted_json.each(
            untrusted_json.record({}, {"epoch": untrusted_json.whole, "step": untrusted_json.whole})
        ),
        "train_seconds": untrusted_json.finite,
        "imbalance_seconds": untrusted_json.finite,
        "stopped_early": untrusted_json.flag,
        "durable_step": untrusted_json.optional(untrusted_json.whole),
        "best": untrusted_json.optional(_best),
        "chain": _hexadecimal,
        "callbacks": untrusted_json.values(untrusted_json.values(untrusted_json.anything)),
    },
)


def _shares(share: untrusted_json.Shape) -> untrusted_json.Shape:
    """Return the shape of a list of shares with different files: a file that is named twice would be read twice."""
    of_each = untrusted_json.each(share)

    def check(value: Any) -> str | None:
        wrong = of_each(value)
        is_named_twice = wrong is None and len({one["file"] for one in value}) < len(value)
        return "names a file more than once" if is_named_twice else wrong

    return check


def _body(crc: str) -> untrusted_json.Shape:
    share = {
        "file": _file,
        "bytes": untrusted_json.whole,
        crc: untrusted_json.whole,
        "names": untrusted_json.each(untrusted_json.text),
    }
    fields = {"step": untrusted_json.whole, "shares": _shares(untrusted_json.record(share)), "document": _DOCUMENT}
    before = untrusted_json.record({"name": untrusted_json.text, "sha256": _hexadecimal})
    return untrusted_json.record(fields, {"before": untrusted_json.optional(before)})


#: By the version of the format; a version below 1 is read as version 1.
_BODIES = {0: _body("crc32"), 1: _body("crc32"), 2: _body("crc32c")}


class ManifestLink(NamedTuple):
    """A checkpoint's folder and its manifest's SHA-256, hexadecimal, as the manifest of the one after it has them."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified.

    Attributes:
        name: its folder, or what else a person may call it.
        step: global steps that it has seen.
        document: what it says beside them.
        tensors: by name.
        is_in_memory: it is a snapshot of nodes' memory, not on storage.
        rows: of the log of steps that were not on storage; of memory alone.
        files: of callbacks, packed, where they are small; of memory alone.
    """

    name: str
    step: int
    document: CheckpointDocument
    tensors: dict[str, np.ndarray]
    is_in_memory: bool = False
    rows: StepRows | None = None
    files: dict[str, bytes] | None = None


def list_complete(run: Storage) -> list[str]:
    """Return the names of checkpoints that have a manifest, newest first."""
    # One list of all files: checking each folder would cost a request for each that was ever left unfinished.
    names = [f.name.removesuffix(f"/{FILE}") for f in run.files(FOLDER) if f.name.endswith(f"/{FILE}")]
    return naming.restore_order([n for n in names if "/" not in n and naming.split_name(n)[0] >= 0])


def dump(document: dict[str, Any]) -> bytes:
    """Return JSON with one spelling for a value, so that equal documents are equal bytes."""
    return json.dumps(document, sort_keys=True, indent=1).encode()


def write(
    run: Storage,
    name: str,
    step: int,
    shares: list[dict[str, Any]],
    document: dict[str, Any],
    before: ManifestLink | None = None,
) -> ManifestLink:
    """Make a checkpoint visible; its shares must be on storage already.

    Args:
        before: the checkpoint that the run wrote or restored before this one.
    """
    link = {} if before is None else {"before": before._asdict()}
    # Through JSON once, so that the checksum is over what a reader will have.
    body = json.loads(dump({"version": VERSION, "step": step, "shares": shares, "document": document, **link}))
    data = dump({"body": body, "crc32": zlib.crc32(dump(body))})
    run.put(f"{FOLDER}/{name}/{FILE}", data)
    return ManifestLink(name, hashlib.sha256(data).hexdigest())


def link(run: Storage, name: str) -> ManifestLink:
    """Return a checkpoint as the one after it names it.

    Raises:
        StorageError: storage refuses.
    """
    data = run.get(f"{FOLDER}/{name}/{FILE}", untrusted_json.LARGE)
    return ManifestLink(name, hashlib.sha256(data).hexdigest())


def delete(run: Storage, name: str) -> None:
    """Delete a checkpoint. The manifest goes first: a deletion cut short leaves no checkpoint that looks complete."""
    run.delete(f"{FOLDER}/{name}/{FILE}")
    run.delete(f"{FOLDER}/{name}")


def size_problems(shares: list[dict[str, Any]], sizes: Mapping[str, int]) -> list[str]:
    """Return what is wrong with the files of a checkpoint by their sizes alone.

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
    """Return the step, the shares and the document of a checkpoint.

    Raises:
        CheckpointError: the manifest is damaged.
        RunMismatchError: it is of a newer raytf.
    """
    where = f"{FOLDER}/{name}/{FILE}"
    try:
        manifest = untrusted_json.parse(run.get(where, untrusted_json.LARGE), where, _MANIFEST)
    except DamagedFileError as error:
        raise CheckpointError(f"checkpoint {name}: the manifest cannot be read ({error.reason}).") from error
    body = manifest["body"]
    if zlib.crc32(dump(body)) != manifest["crc32"]:
        raise CheckpointError(f"checkpoint {name}: the manifest's checksum is wrong.")
    if body["version"] > VERSION:
        raise RunMismatchError(
            f"checkpoint {name} was written by a newer raytf (format {body['version']}; this one reads up to "
            f"{VERSION}). Update raytf."
        )
    wrong = _BODIES[min(body["version"], VERSION)](body)
    if wrong:
        raise CheckpointError(f"checkpoint {name}: the manifest cannot be read ({wrong}).")
    if body["step"] != naming.split_name(name)[0]:
        raise CheckpointError(f"checkpoint {name}: the manifest is that of another checkpoint, of step {body['step']}.")
    return body


@dataclass(frozen=True)
class CheckpointDocument:
    """The facts about a state that the next start of the driver and of workers, and people, need.

    Attributes:
        identity: settings of the run that made it.
        history: logs of each epoch so far, with its `epoch` and the `step` after it.
        train_seconds: in calls of the training step.
        imbalance_seconds: that a worker waited, on average, because shards did not divide evenly.
        stopped_early: a callback has stopped the run.
        best: the metric of `--keep-best` and the best of its values; None for none yet.
        chain: of all steps, 64 hexadecimal digits, see `raytf.distributed.step_digest.chained`; empty where a version
            without it made the state.
        world_size: ranks that made it; None where it does not say.
        callbacks: state of the user's callbacks, without their arrays.
        durable_step: what was known to be on storage when a copy in memory was made; of memory alone.
        weights_hash: of a copy in memory, where ranks compare their weights; else None.
        missing: fields that are needed to continue and were missing when it was read.
    """

    identity: dict[str, str] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    train_seconds: float = 0.0
    imbalance_seconds: float = 0.0
    stopped_early: bool = False
    best: tuple[str, float] | None = None
    chain: str = ""
    world_size: int | None = None
    callbacks: dict[str, Any] = field(default_factory=dict)
    durable_step: int | None = None
    weights_hash: int | None = None
    missing: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> CheckpointDocument:
        """Return the document in the JSON of a manifest or of a slot in memory, without fields of other versions."""
        known = {name: values[name] for name in cls.__dataclass_fields__ if name in values and name != "missing"}
        if known.get("best") is not None:
            known["best"] = (known["best"][0], known["best"][1])
        return cls(**known, missing=tuple(name for name in _NEEDED if name not in values))

    def of_manifest(self) -> dict[str, Any]:
        """Return JSON values for a manifest on storage."""
        return {
            **self._totals(),
            "identity": self.identity,
            "history": self.history,
            "callbacks": self.callbacks,
            "world_size": self.world_size,
            **self._chained(),
        }

    def live(self) -> dict[str, Any]:
        """Return JSON values for memory: what changes with each copy."""
        hashed = {} if self.weights_hash is None else {"weights_hash": self.weights_hash}
        return {
            **self._totals(),
            "durable_step": self.durable_step,
            "world_size": self.world_size,
            **hashed,
            **self._chained(),
        }

    def slow(self) -> dict[str, Any]:
        """Return JSON values for memory: what changes when an epoch ends; see `epochs`."""
        return {"identity": self.identity, "history": self.history}

    @property
    def epochs(self) -> int:
        return len(self.history)

    def _totals(self) -> dict[str, Any]:
        return {
            "train_seconds": self.train_seconds,
            "imbalance_seconds": self.imbalance_seconds,
            "stopped_early": self.stopped_early,
            "best": self.best,
        }

    def _chained(self) -> dict[str, str]:
        return {"chain": self.chain} if self.chain else {}
