"""The contents of `raytf ui`'s pages for a storage, which are read again only after a change."""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from raytf.errors import ConfigError, DamagedFileError, StorageError
from raytf.runs import history, inventory, ledger, run_log
from raytf.runs.history import History
from raytf.runs.inventory import ListedRun
from raytf.runs.lease import LEASE_FILE
from raytf.runs.report import page, series
from raytf.runs.run_folder import SEARCH, TRIAL, TRIAL_RECORD, TRIALS
from raytf.runs.run_state import Run
from raytf.storage import untrusted_json
from raytf.storage.storage import Storage

#: Fields of a run that the list shows.
_ROW = ("name", "state", "why", "step", "total", "metric", "best", "last", "modified", "problems", "trials")
#: Points of a run's small curve in the list.
_SPARK_POINTS = 60
#: Folders of a run that get a new or changed file whenever something happens.
_FOLDERS = (ledger.FOLDER, run_log.STEPS)
#: If the step log has at least this many bytes, the page is shown before the log is read.
_MANY_BYTES = 2 << 20
#: The most pages, and the most sightings of runs, that are kept.
_PAGES, _SIGHTINGS = 8, 256
#: Seconds between two reads of a run's heartbeat in an object store, which charges for each read, and between two lists
#: of the run's files while it trains.
_STORE_SECONDS, _FILES_SECONDS = 1.0, 3.0


@dataclass(frozen=True)
class RunPage:
    """A run's page.

    Attributes:
        mark: version of the run that was drawn, see `Gallery.mark`.
        title: title of the window.
        main: contents of the page, as HTML.
        data: data that its scripts draw.
        run: the run, if the page is complete; otherwise None.
    """

    mark: str
    title: str
    main: str
    data: dict[str, Any]
    run: History | None = None


@dataclass(frozen=True)
class _Sighting:
    """The state of a run when storage was last read.

    Attributes:
        files: names, sizes and times of its newest files, as text.
        sign: its newest heartbeat, as bytes.
        listed: the list's entry for the run, or for the search if the run is a trial.
        is_owned: whether the run has a lease: a process owns it, or died while it did.
        listed_at, asked_at: when the files were listed and the heartbeat was read, by the gallery's clock.
    """

    files: str
    sign: bytes
    listed: ListedRun
    is_owned: bool
    listed_at: float
    asked_at: float

    @property
    def mark(self) -> str:
        return f"{self.files}\n{hashlib.sha256(self.sign).hexdigest()}"


class Gallery:
    """The runs of a storage.

    Args:
        clock: returns monotonic seconds; tests inject their own.
    """

    def __init__(self, storage: Storage, clock: Callable[[], float] = time.monotonic):
        self._storage, self._clock = storage, clock
        self._lock, self._drawing = threading.Lock(), threading.Lock()
        self._runs: dict[str, ListedRun] = {}
        self._rows: list[dict[str, Any]] = []
        self._pages: dict[str, RunPage] = {}
        self._seen: dict[str, _Sighting] = {}
        #: Increases when the list changes.
        self.version = 0

    @property
    def place(self) -> str:
        return self._storage.locate("")

    def refresh(self) -> None:
        """Read the list again.

        Raises:
            StorageError: storage refuses.
        """
        runs = inventory.survey_again(self._storage, self._runs)
        rows = [row(listed.run) for listed in runs.values()]
        with self._lock:
            self._runs = runs
            if rows != self._rows or not self.version:
                self._rows = rows
                self.version += 1

    def rows(self) -> list[dict[str, Any]]:
        with self._lock:
            return self._rows

    def find(self, name: str) -> Storage:
        """Return a run's folder.

        Raises:
            ConfigError: there is no run with that name.
        """
        self._listed(name)
        return self._storage.child(name)

    def _listed(self, name: str) -> ListedRun:
        """Return the list's entry for a run; for a trial, that of its search."""
        search, _, trial = name.rpartition("/")
        with self._lock:
            known = self._runs.get(search if re.fullmatch(rf"{TRIAL}[0-9]+", trial) else name)
        if known is None:
            raise ConfigError(f"there is no run {name!r} in {self.place}")
        return known

    def mark(self, name: str) -> str:
        """Return a text that changes with the run: the first line with its stored files, the second line with its
        heartbeat.

        Raises:
            ConfigError, StorageError: there is no such run, or storage refuses.
        """
        return self._inspect(name).mark

    def _inspect(self, name: str) -> _Sighting:
        """Return the state of a run with as few requests as possible: none if no process owned it and the list shows no
        change, and only one for the heartbeat if that is enough."""
        run, listed, now, known = self.find(name), self._listed(name), self._clock(), self._seen.get(name)
        if known is not None and known.listed is listed:
            if not known.is_owned or (now - known.asked_at < _STORE_SECONDS and not self._storage.is_local):
                return known
            sign = _sign(run)
            if sign == known.sign or now - known.listed_at < _FILES_SECONDS:
                return self._keep(name, replace(known, sign=sign, asked_at=now))
        files: list[Any] = []
        for folder in _FOLDERS:
            stats = {f.name: (f.name, f.bytes, f.modified) for f in run.files(folder)}
            stats.pop(ledger.LIVE, None)
            files += [*sorted(stats.values())[-2:], len(stats)]
        is_owned = run.exists(LEASE_FILE)
        files += [run.exists(run_log.RESULT), is_owned]
        return self._keep(name, _Sighting(repr(files), _sign(run), listed, is_owned, now, now))

    def _keep(self, name: str, seen: _Sighting) -> _Sighting:
        with self._lock:
            self._seen[name] = seen
            while len(self._seen) > _SIGHTINGS:
                del self._seen[next(iter(self._seen))]
        return seen

    def head(self, name: str) -> RunPage:
        """Return the top of a run's page, with the newest heartbeat and without data to draw.

        Raises:
            ConfigError, StorageError: there is no such run, or storage refuses.
        """
        seen = self._inspect(name)
        drawn, sign = self._drawn(name, seen.mark), ledger.sign_of(seen.sign)
        if drawn is None or drawn.run is None or sign is None:
            run = self._load(name)
        else:
            run = history.with_sign(drawn.run, sign)
        return RunPage(seen.mark, f"{name}: {run.state}", page.head(run), {})

    def first_page(self, name: str) -> RunPage:
        """Return a run's page without a long wait: if its step log is large, the page leaves the steps out.

        Raises:
            ConfigError, StorageError: there is no such run, or storage refuses.
        """
        known = self._drawn(name, self.mark(name))
        if known is not None:
            return known
        run = self.find(name)
        if sum(file.bytes for file in run.files(run_log.STEPS)) < _MANY_BYTES:
            return self.page(name)
        loaded = self._load(name)
        return RunPage("", f"{name}: {loaded.state}", *page.parts(loaded))

    def _load(self, name: str) -> History:
        return replace(history.load(self.find(name).uri), name=name)

    def page(self, name: str) -> RunPage:
        """Return a run's page, which is drawn again if a stored file has changed.

        Raises:
            ConfigError, StorageError: there is no such run, or storage refuses.
        """
        mark = self.mark(name)
        with self._drawing:  # of two simultaneous requests, the second gets the page that the first has drawn
            known = self._drawn(name, mark)
            if known is not None:
                return known
            run, steps = history.load_with_steps(self.find(name).uri)
            run = replace(run, name=name)
            made = RunPage(mark, f"{name}: {run.state}", *page.parts(run, steps), run)
            self._pages[name] = made
            while len(self._pages) > _PAGES:
                del self._pages[next(iter(self._pages))]
            return made

    def _drawn(self, name: str, mark: str) -> RunPage | None:
        """Return the last drawn page of a run if no stored file has changed since. A heartbeat changes only the top of
        the page."""
        known = self._pages.get(name)
        return known if known is not None and known.mark.partition("\n")[0] == mark.partition("\n")[0] else None

    def search(self, name: str) -> dict[str, Any]:
        """Return the finished trials of a search, as JSON.

        Raises:
            ConfigError, StorageError: there is no such search, or storage refuses.
        """
        search, trials = self.find(name), []
        for file in search.list(f"{SEARCH}/{TRIALS}"):
            path = f"{SEARCH}/{TRIALS}/{file}"
            record, _ = untrusted_json.attempt(
                lambda path=path: untrusted_json.read(search, path, TRIAL_RECORD, untrusted_json.LARGE)  # type: ignore[misc]
            )
            if record is not None:
                kept = ("number", "parameters", "outcome", "value", "epochs", "why")
                trials.append({key: record.get(key) for key in kept})
        return {"name": name, "trials": sorted(trials, key=lambda trial: trial["number"])}


def settings(run: History) -> dict[str, str]:
    """Return all settings of a run by name. Each entry of a JSON object becomes a setting with its own name."""
    table: dict[str, str] = {}
    for name, text in {**run.made_with, **run.changed, **run.settings}.items():
        before, brace, inner = text.partition("{")
        with contextlib.suppress(ValueError):  # text that only looks like JSON is shown unchanged
            values = untrusted_json.decode((brace + inner).encode())
            table |= {f"{name}, {key}": _short(value) for key, value in values.items()}
            text = before.strip()
        if text:
            table[name] = text
    return table


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else json.dumps(value)


def _sign(run: Storage) -> bytes:
    """Read a run's newest heartbeat, in one request; empty if there is none or it is damaged."""
    try:
        version = run.get_version(f"{ledger.FOLDER}/{ledger.LIVE}")
    except DamagedFileError:
        version = None
    return b"" if version is None else version[0]


def row(run: Run) -> dict[str, Any]:
    """Return a run's row in the list, as JSON."""
    curve = [] if run.metric is None else [v for e in run.epochs if isinstance(v := e.get(run.metric), float)]
    return {
        **{name: getattr(run, name) for name in _ROW},
        "metrics": series.metrics_of(run.epochs),
        "curve": _thin(curve),
    }


def _thin(values: Sequence[float]) -> list[float]:
    count = min(len(values), _SPARK_POINTS)
    kept = [values[i * len(values) // count] for i in range(count)]
    return [float(f"{value:.4g}") for value in kept if math.isfinite(value)]


def keep_fresh(gallery: Gallery, seconds: float, over: threading.Event) -> None:
    """Refresh the list until `over` is set, and continue after storage errors."""
    while not over.wait(seconds):
        began = time.monotonic()
        try:
            gallery.refresh()
        except StorageError:
            over.wait(seconds)
        over.wait(min(30.0, 2 * (time.monotonic() - began)))  # reads take a third of the time at most
