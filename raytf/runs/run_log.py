"""Files of a run besides its checkpoints: the step log, its attempts, its result, and files of callbacks."""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import json
import math
import os
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from raytf.checkpoint import naming
from raytf.checkpoint.step_rows import COLUMNS, StepRows
from raytf.distributed import step_digest
from raytf.distributed.step_digest import DigestLayout
from raytf.errors import DamagedFileError, StorageError, one_line
from raytf.runs import digest_log
from raytf.storage import local_files, untrusted_json
from raytf.storage.refusals import explain
from raytf.storage.storage import Storage

STEPS, ATTEMPTS, RESULT = "steps", "attempts", "result.json"

#: Rows after which a new segment starts; the newest is written again at each save, so it must be short.
SEGMENT_ROWS = 20_000

#: Columns of every segment, and a column that segments of earlier versions lack.
_NEEDED, _NORM = COLUMNS[:4], COLUMNS[4]

#: Columns of a segment after those of `step_rows.COLUMNS`: hexadecimal numbers, or empty.
_HEX = ("digest", "weights")
_MOST_DIGITS = 15
_ATTEMPT = untrusted_json.record(
    {"world_size": untrusted_json.whole, "time": untrusted_json.when},
    {"attempt": untrusted_json.text, "from_step": untrusted_json.whole, "tier": untrusted_json.text},
)
_RESULT = untrusted_json.record(
    {"steps": untrusted_json.whole},
    {
        "metrics": untrusted_json.values(untrusted_json.optional(untrusted_json.number)),
        "history": untrusted_json.each(
            untrusted_json.record({}, {"epoch": untrusted_json.whole, "step": untrusted_json.whole})
        ),
        "weights_sha256": untrusted_json.text,
        "samples_per_second": untrusted_json.finite,
        "stopped_early": untrusted_json.flag,
        "world_sizes": untrusted_json.each(untrusted_json.whole),
        "restarts": untrusted_json.whole,
        "regroups": untrusted_json.whole,
        "export": untrusted_json.values(untrusted_json.text),
    },
)
#: Numbers for attempts whose caller passes none.
_numbers = itertools.count(1)


def new_attempt(now: float | None = None, number: tuple[int, int] | None = None) -> str:
    """Return a name for a start of a worker group. Names sort by their numbers, and after names of earlier versions,
    which have no number. The time in a name is for people.

    Args:
        now: the time in seconds since the epoch; by default the current time.
        number: the driver's term (`latest_term`), and a number that increases within the term. By default term 0 and a
            number that increases within this process.
    """
    term, count = (0, next(_numbers)) if number is None else number
    return f"a{term:06d}.{count:06d}-{naming.stamp(now)}"


#: Folders to which a run's attempts write.
_OWN = (STEPS, ATTEMPTS, "files", "tensorboard", "ledger", "checkpoints")


def abort_uploads(run: Storage) -> None:
    """Abort the unfinished uploads of a killed command.

    The owner of the lease calls it before its first attempt, when all unfinished uploads are from earlier attempts.
    Uploads of other commands, such as `raytf export`, are not aborted. Errors of the store are ignored.
    """
    with contextlib.suppress(StorageError):
        run.abort_uploads("", lambda name: name.partition("/")[0] in _OWN and "/" in name)


class StepLog:
    """Loss and learning rate of every step, in segments: steps/START-ATTEMPT.csv, with digests in .digests beside it.

    An attempt that restores step s begins a segment at s+1. Its rows replace those of earlier segments from there on,
    so readers get the history of the current weights.

    Args:
        digests: the layout of the steps' digests; None without digests.
    """

    def __init__(self, run: Storage, attempt: str, digests: DigestLayout | None = None):
        self._run, self._attempt, self._digests = run, attempt, digests
        #: Rows of the current segment.
        self._chunks: list[StepRows] = []
        #: Number of rows of the current segment that are on storage.
        self._written = 0

    def add(
        self,
        first_step: int,
        epoch: int,
        losses: np.ndarray,
        rates: np.ndarray,
        digests: np.ndarray | None = None,
        norms: np.ndarray | None = None,
    ) -> None:
        """Add the steps `first_step`, `first_step` + 1, ... (counted from 1)."""
        numbers = np.full((len(losses), len(COLUMNS)), np.nan)
        numbers[:, 0] = np.arange(first_step, first_step + len(losses))
        numbers[:, 1], numbers[:, 2], numbers[:, 3] = epoch, losses, rates
        if norms is not None:
            numbers[:, 4] = norms
        digest_rows = np.empty((len(losses), 0), np.uint8) if digests is None else digests
        self._chunks.append(StepRows(numbers, digest_rows))

    def weigh(self, step: int, value: int) -> None:
        """Add the hash of the weights after a step, if the step is in the last row."""
        if self._chunks and self._chunks[-1].numbers[-1, 0] == step:
            self._chunks[-1] = self._chunks[-1].weighed(step, value)

    def renewed(self) -> StepLog:
        """Return a log that continues the same segment under another name. It replaces everything that this log has
        written or will write."""
        log = StepLog(self._run, f"{self._attempt}~", self._digests)
        log._chunks = list(self._chunks)
        return log

    def restore(self, rows: StepRows) -> None:
        """Start with the rows that an earlier attempt had not written yet."""
        self._chunks = [rows] if len(rows) else []

    def since(self, step: int) -> StepRows:
        return StepRows.joined([chunk for chunk in self._chunks if chunk.numbers[-1, 0] > step]).after(step)

    def forget(self, step: int) -> None:
        """Drop the rows up to a step, which another process has written."""
        self._chunks = [chunk for chunk in self._chunks if chunk.numbers[-1, 0] > step]

    def take(self) -> StepRows:
        """Return the current rows of the segment for `write`. If the segment is on storage and long enough, start the
        next one."""
        rows = StepRows.joined(self._chunks)
        if self._written >= SEGMENT_ROWS:
            rows, self._written = rows.part(self._written), 0
        self._chunks = [rows] if len(rows) else []
        return rows

    def write(self, rows: StepRows) -> None:
        """Write a segment to storage, with the digests first, so that each readable step has its digest."""
        if not len(rows):
            return
        name = f"{STEPS}/{int(rows.numbers[0, 0]):012d}-{self._attempt}"
        if self._digests is not None:
            self._run.put(f"{name}{digest_log.SUFFIX}", digest_log.dump(self._digests, rows))
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow((*COLUMNS, *_HEX))
        for (step, epoch, loss, rate, norm), digest in zip(rows.numbers.tolist(), rows.digests, strict=True):
            weights = rows.weights.get(int(step))
            total = _hex(step_digest.number(digest.tobytes()) or None)
            # The order of this sum is not fixed; this many digits are equal on every machine.
            short = "" if math.isnan(norm) else f"{norm:.4g}"
            writer.writerow([int(step), int(epoch), loss, rate, short, total, _hex(weights)])
        self._run.put(f"{name}.csv", text.getvalue().encode())
        self._written = len(rows)


def _hex(value: int | None) -> str:
    return "" if value is None else f"{value:016x}"


def read_steps(uri: str) -> dict[str, np.ndarray]:
    """Return the loss of every committed step of a run.

    Args:
        uri: the run's folder, e.g. `~/raytf-runs/mnist`.

    Returns:
        The columns step (from 1), epoch (from 0), loss, learning_rate and gradient_norm (NaN if unknown).

    Raises:
        DamagedFileError: a segment is damaged or not from raytf.
    """
    run = Storage(uri)
    tables: list[np.ndarray] = []
    # From its first step on, a segment replaces those of earlier attempts. Attempts sort by number.
    segments = sorted(
        (n for n in run.list(STEPS) if n.endswith(".csv")), key=lambda n: (n.partition("-")[2], n.partition("-")[0])
    )
    for name in segments:
        rows = _segment(run, f"{STEPS}/{name}")
        start = int(name.partition("-")[0])
        tables = [table[: np.searchsorted(table[:, 0], start)] for table in tables]
        tables.append(rows)
    table = np.concatenate([np.zeros((0, len(COLUMNS))), *tables])
    columns = dict(zip(COLUMNS, table.T, strict=True))
    return {**columns, "step": columns["step"].astype(int), "epoch": columns["epoch"].astype(int)}


def _segment(run: Storage, name: str) -> np.ndarray:
    """Return the rows of a segment, [n, columns], in the order of their steps, none before the step in its name."""
    where, last = run.locate(name), -1
    first = name.removeprefix(f"{STEPS}/").partition("-")[0]
    if not (first.isascii() and first.isdecimal() and len(first) <= _MOST_DIGITS):
        raise DamagedFileError(where, f"its name begins with {first[:20]!r}, expected a step")
    rows = []
    try:
        text = run.get(name, untrusted_json.LARGE).decode()
        lines = csv.reader(io.StringIO(text), strict=True)
        columns = next(lines, [])
        if not set(_NEEDED) <= set(columns):
            raise ValueError(f"it has no line with the columns {', '.join(_NEEDED)}")
        places = [columns.index(column) for column in _NEEDED]
        norm = columns.index(_NORM) if _NORM in columns else None
        whole = None if norm is None else _as_table(text, [*places, norm], int(first))
        if whole is not None:
            return whole
        for line in filter(None, lines):
            row = [float(line[place]) for place in places]
            step, epoch, *_ = row
            if not (last < step == math.floor(step) <= untrusted_json.MOST and int(first) <= step):
                raise ValueError(f"step {line[places[0]][:20]!r} comes after step {last}")
            if not 0 <= epoch == math.floor(epoch) <= untrusted_json.MOST:
                raise ValueError(f"epoch {line[places[1]][:20]!r} is not a whole number")
            rows.append([*row, math.nan if norm is None else float(line[norm] or "nan")])
            last = int(step)
    except UnicodeDecodeError:
        raise DamagedFileError(where, "it is not text in UTF-8") from None
    except IndexError:
        raise DamagedFileError(where, f"the row after step {last} is cut off") from None
    except (ValueError, OverflowError, csv.Error) as error:
        raise DamagedFileError(where, one_line(error, 120)) from None
    return np.array(rows, np.float64).reshape(-1, len(COLUMNS))


def _as_table(text: str, places: Sequence[int], first: int) -> np.ndarray | None:
    """Parse an undamaged segment ten times as fast as row by row; return None if anything is wrong with it.

    Args:
        text: the segment, whose first line has the names of the columns.
        places: the indexes of the columns.
        first: the lowest step that is allowed.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # NumPy warns if there are no rows
            table = np.loadtxt(io.StringIO(text), delimiter=",", skiprows=1, usecols=places, ndmin=2, comments=None)
    except (ValueError, UserWarning):
        return None
    steps, epochs = table[:, 0], table[:, 1]
    in_order = steps[0] >= first and bool(np.all(np.diff(steps) > 0)) and steps[-1] <= untrusted_json.MOST
    whole = np.all(steps == np.floor(steps)) and np.all(epochs == np.floor(epochs))
    return table if in_order and whole and np.all((epochs >= 0) & (epochs <= untrusted_json.MOST)) else None


def write_attempt(run: Storage, attempt: str, world_size: int, origin: tuple[int, str], now: float) -> None:
    """Record that workers started at `now` (seconds since the epoch). `origin` is the step and its state's tier."""
    step, tier = origin
    note = {"attempt": attempt, "world_size": world_size, "from_step": step, "tier": tier, "time": now}
    run.put(f"{ATTEMPTS}/{attempt}.json", json.dumps(note).encode())


def attempt_names(run: Storage) -> list[str]:
    """Return the names of all starts of worker groups of this run, oldest first."""
    return [n.removesuffix(".json") for n in run.list(ATTEMPTS) if n.endswith(".json")]


def read_attempts(run: Storage) -> list[dict[str, Any]]:
    """Return all starts of worker groups of this run, oldest first, without damaged records, which must not stop a
    run."""
    attempts = []
    for name in run.list(ATTEMPTS):
        if name.endswith(".json"):
            with contextlib.suppress(DamagedFileError):
                attempts.append(untrusted_json.read(run, f"{ATTEMPTS}/{name}", _ATTEMPT))
    return [attempt for attempt in attempts if attempt is not None]


def read_result(run: Storage) -> dict[str, Any] | None:
    """Return the result of a finished run, or None if there is none.

    Raises:
        DamagedFileError: the result cannot be read.
    """
    return _with_nan(untrusted_json.read(run, RESULT, _RESULT, untrusted_json.LARGE))


def parse_result(data: bytes, where: str) -> dict[str, Any]:
    """Parse the bytes of a result.

    Raises:
        DamagedFileError: the bytes are not a result.
    """
    return _with_nan(untrusted_json.parse(data, where, _RESULT))


def _with_nan(result: Any) -> Any:
    """Return a result with NaN in place of null, which stands for NaN in JSON."""
    for values in [] if result is None else [result.get("metrics", {}), *result.get("history", [])]:
        values.update((name, math.nan) for name, value in values.items() if value is None)
    return result


class MirroredFolder:
    """A local folder whose files are mirrored to a folder in the run.

    On local storage, it is that folder itself; for an object store, a temporary folder whose changes `upload` copies.
    """

    def __init__(self, run: Storage, name: str):
        self._run, self._name = run, name
        self._uploaded: dict[str, tuple[float, int]] = {}
        if run.is_local:
            self.path = run.locate(name)
            try:
                os.makedirs(self.path, exist_ok=True)
            except OSError as error:
                raise explain("make", self.path, error) from error
        else:
            self._temporary = tempfile.TemporaryDirectory(prefix=f"raytf-{name}-")  # is deleted with this object
            self.path = self._temporary.name

    def fetch(self, packed: dict[str, bytes] | None = None) -> None:
        """Fetch the files of an earlier attempt from storage or from the result of its `pack`."""
        if self._run.is_local:
            return
        if packed is None:
            self._run.get_tree(self._name, self.path)
            self._uploaded = self._state()
            return
        for relative, data in packed.items():
            local_files.check_plain(relative, self._run.locate(self._name))
            local_files.put_inside(self.path, relative, data)

    def pack(self, limit: int) -> dict[str, bytes] | None:
        """Return all files by relative path; empty on local storage, which has them already.

        Returns:
            None if the files have more than `limit` bytes.
        """
        state = {} if self._run.is_local else self._state()
        if sum(size for _, size in state.values()) > limit:
            return None
        packed = {}
        for relative in state:
            with contextlib.suppress(FileNotFoundError), open(os.path.join(self.path, relative), "rb") as file:
                packed[relative] = file.read()
        return packed

    def upload(self) -> None:
        """Copy the files that changed since the last upload."""
        if self._run.is_local:
            return
        for relative, seen in self._state().items():
            if self._uploaded.get(relative) != seen:
                try:
                    with open(os.path.join(self.path, relative), "rb") as stream:
                        self._run.put(f"{self._name}/{relative}", stream.read())
                except StorageError:
                    raise
                except OSError:
                    continue  # its writer has just removed the file
                self._uploaded[relative] = seen

    def forget(self) -> None:
        """Forget all uploads, so that the next one copies every file."""
        self._uploaded = {}

    def _state(self) -> dict[str, tuple[float, int]]:
        state = {}
        for base, _, files in os.walk(self.path):
            for file in files:
                path = os.path.join(base, file)
                with contextlib.suppress(FileNotFoundError):
                    stat = os.stat(path)
                    state[os.path.relpath(path, self.path).replace(os.sep, "/")] = (stat.st_mtime, stat.st_size)
        return state
