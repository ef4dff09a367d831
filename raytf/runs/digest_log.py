"""Digests of a run's steps on storage: steps/START-ATTEMPT.digests, beside the segments of the step log.

A line of JSON describes the layout; the bytes of each step follow, as `raytf.distributed.step_digest` defines them.
From its first step on, a segment replaces the segments of earlier attempts, as in `run_log`.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from raytf.checkpoint.step_rows import StepRows
from raytf.distributed.step_digest import DigestKind, DigestLayout
from raytf.errors import DamagedFileError
from raytf.storage import untrusted_json
from raytf.storage.storage import Storage

SUFFIX = ".digests"
#: The suffix of the files with the losses.
_LOSSES = ".csv"
#: Maximum number of bytes of a segment.
_MOST_BYTES = 1 << 30


def _kind(value: Any) -> str | None:
    known = ", ".join(DigestKind)
    return None if value in list(DigestKind) else f"is none of {known}, so a newer raytf has written it"


#: Without a kind, `on_device` decides between the first two kinds of digests.
_HEADER = untrusted_json.record(
    {
        "first": untrusted_json.whole,
        "steps": untrusted_json.whole,
        "shards": untrusted_json.whole,
        "tensors": untrusted_json.each(untrusted_json.text),
        "crc32": untrusted_json.whole,
    },
    {"kind": _kind, "on_device": untrusted_json.flag},
)


@dataclass(frozen=True)
class DigestSegment:
    """Digests of consecutive steps.

    Attributes:
        first: the first step, counted from 1.
        layout: the layout of a row.
        rows: [steps, bytes] uint8.
    """

    first: int
    layout: DigestLayout
    rows: np.ndarray


@dataclass(frozen=True)
class RunDigests:
    """Digests of a run's steps; for repeated steps, those of the last attempt.

    Attributes:
        segments: in the order of their steps, without overlaps.
    """

    segments: Sequence[DigestSegment]

    def of(self, step: int) -> tuple[DigestLayout, bytes] | None:
        """Return the layout and the digests of a step, or None if it has no digests."""
        for segment in self.segments:
            if segment.first <= step < segment.first + len(segment.rows):
                row = segment.rows[step - segment.first]
                return (segment.layout, row.tobytes()) if row.any() else None
        return None


def dump(layout: DigestLayout, rows: StepRows) -> bytes:
    """Return the contents of a segment's file."""
    # Rows from an older raytf have no digests, or shorter ones.
    digests = np.zeros((len(rows), layout.bytes), np.uint8)
    if rows.digests.shape[1] == layout.bytes:
        digests[:] = rows.digests
    raw = digests.tobytes()
    header = {
        "first": int(rows.numbers[0, 0]),
        "steps": len(rows),
        "shards": layout.shards,
        "tensors": list(layout.tensors),
        "kind": layout.kind,
        "crc32": zlib.crc32(raw),
    }
    return json.dumps(header, separators=(",", ":")).encode() + b"\n" + raw


def parse(data: bytes, where: str) -> DigestSegment:
    """Parse a segment's file.

    Args:
        where: the place of the file, for people.

    Raises:
        DamagedFileError: the file is damaged or not from raytf.
    """
    head, newline, raw = data.partition(b"\n")
    header = untrusted_json.parse(head, where, _HEADER)
    kind = header.get("kind", DigestKind.DEVICE if header.get("on_device") else DigestKind.WHOLE)
    layout = DigestLayout(header["shards"], tuple(header["tensors"]), DigestKind(kind))
    expected = layout.bytes * header["steps"]
    if not newline or len(raw) != expected:
        raise DamagedFileError(where, f"it has {len(raw)} bytes of digests, expected {expected}")
    if zlib.crc32(raw) != header["crc32"]:
        raise DamagedFileError(where, "its checksum is wrong")
    return DigestSegment(header["first"], layout, np.frombuffer(raw, np.uint8).reshape(-1, layout.bytes))


def read(run: Storage, folder: str) -> RunDigests:
    """Read the digests of the steps of a run.

    Args:
        folder: the folder of the step log in the run.

    Raises:
        DamagedFileError: a segment is damaged or not from raytf.
        StorageError: the storage refuses.
    """
    names = set(run.list(folder))
    stems = {name.rpartition(".")[0] for name in names if name.endswith((SUFFIX, _LOSSES))}
    segments: list[DigestSegment] = []
    # Attempts sort by number, and their segments by step.
    for stem in sorted(stems, key=lambda n: (n.partition("-")[2], n.partition("-")[0])):
        where, first = f"{folder}/{stem}{SUFFIX}", stem.partition("-")[0]
        later = parse(run.get(where, _MOST_BYTES), run.locate(where)) if f"{stem}{SUFFIX}" in names else None
        begin = later.first if later is not None else int(first) if first.isdecimal() else None
        if begin is not None:  # also for an attempt without digests
            segments = [before for segment in segments if (before := _up_to(segment, begin)) is not None]
        segments += [] if later is None else [later]
    return RunDigests(segments)


def are_old(run: Storage, folder: str) -> bool:
    """Return whether a run has unfolded digests, and must continue with this kind; see `DigestKind`.

    Raises:
        StorageError: the storage refuses.
    """
    for name in sorted(run.list(folder), reverse=True):
        with contextlib.suppress(DamagedFileError):
            if name.endswith(SUFFIX):
                where = f"{folder}/{name}"
                return parse(run.get(where, _MOST_BYTES), run.locate(where)).layout.kind == DigestKind.WHOLE
    return False


def _up_to(segment: DigestSegment, step: int) -> DigestSegment | None:
    rows = segment.rows[: max(0, step - segment.first)]
    return DigestSegment(segment.first, segment.layout, rows) if len(rows) else None
