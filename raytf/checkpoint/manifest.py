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
#: Incremented when older versions of raytf cannot read what this one writes.
VERSION = 2

_MANIFEST = untrusted_json.record(
    {"body": untrusted_json.record({"version": untrusted_json.whole}), "crc32": untrusted_json.whole}
)
#: Fields that a run needs to continue from a checkpoint.
_NEEDED = ("identity", "history", "train_seconds", "imbalance_seconds", "stopped_early", "callbacks")


#: The name of a file in the checkpoint's own folder.
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
    """Return the shape of a list of shares with distinct files, since a file that is named twice is read twice."""
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


#: Version of the format -> shape of the body. Version 0 is read as version 1.
_BODIES = {0: _body("crc32"), 1: _body("crc32"), 2: _body("crc32c")}


class ManifestLink(NamedTuple):
    """A checkpoint's folder and its manifest's SHA-256 in hexadecimal digits, as the next manifest contains them."""

    name: str
    sha256: str


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read and verified.

    Attributes:
        name: its folder or, for a snapshot in memory, a description for users.
        step: global steps that it has seen.
        document: its facts besides the tensors.
        tensors: its tensors by name.
        is_in_memory: whether it is a snapshot in nodes' memory instead of a checkpoint on storage.
        rows: for a snapshot in memory, rows of the log of steps that were not on storage.
        files: for a snapshot in memory, the packed files of callbacks, if they are small.
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
    # One list of all files, because checking folders would cost a request for each save that was left unfinished.
    names = [f.name.removesuffix(f"/{FILE}") for f in run.files(FOLDER) if f.name.endswith(f"/{FILE}")]
    return naming.restore_order([n for n in names if "/" not in n and naming.split_name(n)[0] >= 0])


def dump(document: dict[str, Any]) -> bytes:
    """Return canonical JSON, in which equal documents are equal bytes."""
    return json.dumps(document, sort_keys=True, indent=1).encode()


def write(
    run: Storage,
    name: str,
    step: int,
    shares: list[dict[str, Any]],
    document: dict[str, Any],
    before: ManifestLink | None = None,
) -> ManifestLink:
    """Write the manifest, which makes a checkpoint visible. Its shares must be on storage already.

    Args:
        before: the checkpoint that the run wrote or restored before this one.
    """
    link = {} if before is None else {"before": before._asdict()}
    # Convert to JSON and back once, so that the checksum is of the values that a reader gets.
    body = json.loads(dump({"version": VERSION, "step": step, "shares": shares, "document": document, **link}))
    data = dump({"body": body, "crc32": zlib.crc32(dump(body))})
    run.put(f"{FOLDER}/{name}/{FILE}", data)
    return ManifestLink(name, hashlib.sha256(data).hexdigest())


def link(run: Storage, name: str) -> ManifestLink:
    """Return the link to a checkpoint, for the manifest of the next one.

    Raises:
        StorageError: storage fails.
    """
    data = run.get(f"{FOLDER}/{name}/{FILE}", untrusted_json.LARGE)
    return ManifestLink(name, hashlib.sha256(data).hexdigest())


def delete(run: Storage, name: str) -> None:
    """Delete a checkpoint, its manifest first, so that an interrupted deletion leaves no seemingly complete one."""
    run.delete(f"{FOLDER}/{name}/{FILE}")
    run.delete(f"{FOLDER}/{name}")


def size_problems(shares: list[dict[str, Any]], sizes: Mapping[str, int]) -> list[str]:
    """Return the problems of a checkpoint's files that their sizes show.

    Args:
        shares: the shares in the manifest.
        sizes: the bytes of each file in the folder.
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
    """Return the body of a checkpoint's manifest: the step, the shares and the document.

    Raises:
        CheckpointError: the manifest is damaged.
        RunMismatchError: a newer version of raytf wrote it.
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
        raise CheckpointError(f"checkpoint {name}: the manifest belongs to another checkpoint, of step {body['step']}.")
    return body


@dataclass(frozen=True)
class CheckpointDocument:
    """The facts about a state that users, and the next start of the driver and of workers, need.

    Attributes:
        identity: settings of the run that made the state.
        history: logs of each epoch so far, with its `epoch` and the `step` after it.
        train_seconds: seconds spent in calls of the training step.
        imbalance_seconds: average seconds that a worker waited because shards did not divide evenly.
        stopped_early: whether a callback has stopped the run.
        best: the metric of `--keep-best` and its best value; None if there is none yet.
        chain: the chain over all steps, 64 hexadecimal digits, see `raytf.distributed.step_digest.chained`; empty if
            the state is from a version without chains.
        world_size: how many ranks made the state; None if it is not known.
        callbacks: state of the user's callbacks, without their arrays.
        durable_step: for a copy in memory, the newest step that was known to be on storage when it was made.
        weights_hash: for a copy in memory, the hash of the weights if ranks compare them; else None.
        missing: fields that are needed to continue but were missing when the document was read.
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
        """Return the document from the JSON of a manifest or of a slot in memory, ignoring unknown fields."""
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
        """Return the JSON values that change with each copy in memory."""
        hashed = {} if self.weights_hash is None else {"weights_hash": self.weights_hash}
        return {
            **self._totals(),
            "durable_step": self.durable_step,
            "world_size": self.world_size,
            **hashed,
            **self._chained(),
        }

    def slow(self) -> dict[str, Any]:
        """Return the JSON values for copies in memory that change only when an epoch ends; see `epochs`."""
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
