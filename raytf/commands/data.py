"""`raytf data convert` writes data as TFRecord or Parquet files; `raytf data check` finds damaged records."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Literal

import tyro
from annotated_types import Ge
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from raytf.commands._places import answering
from raytf.commands._table import show, size_text
from raytf.config.setting import Usual
from raytf.config.terminal_text import say
from raytf.data.image_datasets import open_splits
from raytf.data.sources.detect import ReadOptions
from raytf.data.sources.writer import FileLayout, identity_of, open_folder, write
from raytf.data.validation import DataFindings, check
from raytf.storage import uris
from raytf.storage.storage import Storage

#: Seconds between lines of progress without a terminal.
_PLAIN_SECONDS = 5.0
#: The maximum number of problems to show for one part of the data.
_SHOWN = 100


@dataclass(frozen=True)
class Columns:
    """The flags for reading data that does not describe itself."""

    x: Annotated[str, Usual()] = ""
    """Column, feature or array of the inputs; separate several names with commas. The default depends on the format."""
    y: Annotated[str | None, Usual()] = None
    """Column, feature or array of the labels; pass an empty name for data without labels."""
    sample_weight: Annotated[str, Usual()] = ""
    """Column, feature or array of the sample weights."""
    image_size: Annotated[tuple[int, int] | None, tyro.conf.arg(metavar="HEIGHT WIDTH"), Usual()] = None
    """Height and width to which JPEG and PNG images are resized; by default, all must be as large as the first."""
    channels: Annotated[Literal[1, 3] | None, Usual()] = None
    """1 for gray images, 3 for color; by default, the channels of the first image."""
    fit: Annotated[Literal["crop", "stretch"], Usual()] = "crop"
    """How to resize an image with another aspect ratio: crop keeps its center, stretch distorts it."""

    def reading(self) -> ReadOptions:
        """Return the flags as options for a data source."""
        names = tuple(name.strip() for name in self.x.split(",") if name.strip())
        return ReadOptions(names, self.y, self.sample_weight or None, self.image_size, self.channels, self.fit)


@dataclass(frozen=True)
class Convert:
    """Write data, file by file, as TFRecord or Parquet files that suit object stores. Records keep their order. If the
    command is killed, run it again: it continues, and writes the same bytes."""

    src: tyro.conf.Positional[str]
    """A folder, file or URI of IDX, .npz, TFRecord, Parquet, CSV or image files; or mnist or digits."""
    dst: tyro.conf.Positional[str]
    """A folder or URI for only these files; each part of the data (train, test) has a subfolder."""
    to: Literal["tfrecord", "parquet"]
    """Format of the files."""
    file_mb: Annotated[int, Ge(1)] = 128
    """Size of a file in MiB, before compression; each file is built in memory."""
    block_kb: Annotated[int | None, Ge(1)] = None
    """Size in KiB of a block, such as a Parquet row group, which is read at once; by default 1/256 of the data, but at
    least 256 and at most 8,192."""
    columns: Columns = Columns()


@dataclass(frozen=True)
class DataCheck:
    """Read all data, find damaged records, and print shapes, dtypes and label counts. The exit code is 1 if anything is
    damaged."""

    src: tyro.conf.Positional[str]
    """A folder, file or URI of IDX, .npz, TFRecord, Parquet, CSV or image files; or mnist or digits."""
    json: bool = False
    """Print JSON instead of text."""
    columns: Columns = Columns()


def convert(flags: Convert) -> None:
    """Write data as TFRecord or Parquet files.

    Raises:
        RaytfError: the source cannot be read, or the destination cannot be written.
    """
    destination = Storage(flags.dst)
    if not uris.is_folder(flags.src):
        answering(flags.src)
    destination.preflight()
    sources = open_splits(flags.src, flags.columns.reading())
    plans = []
    for split, source in sources.items():
        block = None if flags.block_kb is None else flags.block_kb << 10
        layout = FileLayout.of(flags.to, source.spec, source.records, flags.file_mb << 20, block)
        folder = destination.child(split) if split else destination
        identity = identity_of(source, layout)
        open_folder(folder, source, layout, identity).begin()
        plans.append((split, source, layout, folder, identity))
    console = Console(stderr=True, highlight=False)
    for split, source, layout, folder, identity in plans:
        began = time.monotonic()
        with bar(f"{split or 'records'}", source.records, console) as progress:
            did = write(folder, source, layout, identity, progress)
        files = [f for f in folder.files() if f.name.startswith("part-")]
        size = sum(f.bytes for f in files)
        seconds = time.monotonic() - began
        rate = f", {source.records / max(seconds, 1e-9):,.0f} records/s" if did else ", already converted"
        count = f"{len(files)} file{'' if len(files) == 1 else 's'}"
        say(f"{folder.locate('')}: {source.records:,} records in {count}, {size_text(size)}{rate}")


def examine(flags: DataCheck) -> None:
    """Find and report damaged records, and exit: with 1 if there are any, otherwise with 0."""
    if not uris.is_folder(flags.src):
        answering(flags.src)
    console = Console(stderr=True, highlight=False)
    with bar("checked", 1000, console) as progress:
        findings = check(flags.src, flags.columns.reading(), lambda share: progress(int(1000 * share)))
    damaged = any(f.problems for f in findings)
    if flags.json:
        print(json.dumps([_document(f) for f in findings], indent=1))
    else:
        for split in findings:
            _print(split)
        if not damaged:
            say("nothing is damaged")
    sys.exit(1 if damaged else 0)


#: The subcommands of `raytf data`.
SUBCOMMANDS = {"convert": convert, "check": examine}


@contextmanager
def bar(what: str, total: int, console: Console) -> Iterator[Callable[[int], None]]:
    """Show a progress bar on a terminal, or a line every few seconds elsewhere. Yield a function that sets how many of
    `total` are done."""
    if not console.is_terminal:
        last = time.monotonic()

        def line(done: int) -> None:
            nonlocal last
            if time.monotonic() - last >= _PLAIN_SECONDS:
                last = time.monotonic()
                console.print(f"{what}: {done / total:.0%}", soft_wrap=True)

        yield line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(what, total=total)
        yield lambda done: progress.update(task, completed=done)


def _document(findings: DataFindings) -> dict[str, Any]:
    document = asdict(findings)
    document["labels"] = {str(k): v for k, v in sorted(findings.labels.items())}
    document["problems"] = [{"place": place, "why": why} for place, why in findings.problems]
    return document


def _print(findings: DataFindings) -> None:
    title = f"{findings.split}: " if findings.split else ""
    parts = f"{findings.files} file{'' if findings.files == 1 else 's'}"
    files = f" in {parts}, {size_text(findings.bytes)}" if findings.files else ""
    say(f"{title}{findings.kind}, {findings.records:,} good records{files}")
    rows = []
    for name, spec in findings.specs.items():
        low, high = findings.ranges.get(name, (float("nan"),) * 2)
        odd = f"{findings.not_finite[name]:,} not finite" if findings.not_finite[name] else ""
        rows.append((name, str(list(spec.shape)), spec.dtype, f"{low:g}", f"{high:g}", odd))
    if rows:
        show(("array", "shape", "dtype", "least", "most", ""), rows)
    if findings.labels:
        names = findings.classes or ()
        texts = []
        for label, count in sorted(findings.labels.items()):
            called = names[label] if 0 <= label < len(names) else ""
            texts.append(f"{label}{f' ({called})' if called not in ('', str(label)) else ''}: {count:,}")
        more = f" and {len(texts) - 100} more" if len(texts) > 100 else ""
        say(f"labels {', '.join(texts[:100])}{more}")
    for place, why in findings.problems[:_SHOWN]:
        say(f"damaged: {place}: {why}")
    if len(findings.problems) > _SHOWN:
        say(f"damaged: {len(findings.problems) - _SHOWN:,} more")
