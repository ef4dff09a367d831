"""What the pages show of a storage; read again only where something has changed."""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raytf.errors import ConfigError, StorageError
from raytf.runs import history, inventory, ledger, run_log
from raytf.runs.inventory import Run
from raytf.runs.report import learning, page
from raytf.runs.search_files import RECORD, SEARCH, TRIAL, TRIALS
from raytf.storage import untrusted_json
from raytf.storage.storage import Storage

#: Points of a run's small curve in the list.
_SPARK_POINTS = 60
#: Folders of a run that tell that something has happened, and its files that do.
_FOLDERS = (ledger.FOLDER, run_log.STEPS)
#: Bytes of the log of steps from which a page is shown before they are read.
_MANY_BYTES = 2 << 20
#: Pages that are kept.
_PAGES = 8


@dataclass(frozen=True)
class RunPage:
    """A run's page.

    Attributes:
        mark: of what it was drawn of, see `Gallery.mark`.
        title: of its window.
        main: HTML.
        data: that its scripts draw.
    """

    mark: str
    title: str
    main: str
    data: dict[str, Any]


class Gallery:
    """The runs of a storage.

    Args:
        storage: in which they are.
    """

    def __init__(self, storage: Storage):
        self._storage = storage
        self._lock, self._drawing = threading.Lock(), threading.Lock()
        self._rows: list[dict[str, Any]] = []
        self._names: set[str] = set()
        self._pages: dict[str, RunPage] = {}
        #: Changes with the list.
        self.version = 0

    @property
    def place(self) -> str:
        """Where the runs are, for people."""
        return self._storage.locate("")

    def refresh(self) -> None:
        """Read the list again.

        Raises:
            StorageError: storage refuses.
        """
        rows = [row(run) for run in inventory.survey(self._storage)]
        with self._lock:
            if rows != self._rows or not self.version:
                self._rows, self._names = rows, {each["name"] for each in rows}
                self.version += 1

    def rows(self) -> list[dict[str, Any]]:
        """The list, as JSON."""
        with self._lock:
            return self._rows

    def find(self, name: str) -> Storage:
        """A run's folder.

        Raises:
            ConfigError: there is none of that name.
        """
        with self._lock:
            known = name in self._names or (name.rpartition("/")[0] in self._names and f"/{TRIAL}" in name)
        if not known or ".." in name:
            raise ConfigError(f"there is no run {name!r} in {self.place}")
        return self._storage.child(name)

    def mark(self, name: str) -> str:
        """A text that changes when something of a run does: in its first line of what is kept, and in its second one of
        the sign of life.

        Raises:
            ConfigError, StorageError: there is no such run, or storage refuses.
        """
        run, files, lives = self.find(name), [], None
        for folder in _FOLDERS:
            found = {f.name: (f.name, f.bytes, f.modified) for f in run.files(folder)}
            lives = found.pop(ledger.LIVE, lives)
            files += [*sorted(found.values())[-2:], len(found)]
        told = [run.exists(file) for file in (run_log.RESULT, "lease.json")]
        return f"{(files, told)!r}\n{lives!r}"

    def head(self, name: str) -> RunPage:
        """What a run's page says first, with the newest sign of life; without data to draw.

        Raises:
            ConfigError, StorageError: there is no such run, or storage refuses.
        """
        mark, found = self.mark(name), history.load(self.find(name).uri)
        return RunPage(mark, f"{name}: {found.state}", page.head(found), {})

    def first_page(self, name: str) -> RunPage:
        """A run's page, at once: where there are many steps, without them, as long as `page` has not read them.

        Raises:
            ConfigError, StorageError: there is no such run, or storage refuses.
        """
        known = self._drawn(name, self.mark(name))
        if known is not None:
            return known
        run = self.find(name)
        if sum(file.bytes for file in run.files(run_log.STEPS)) < _MANY_BYTES:
            return self.page(name)
        found = history.load(run.uri)
        return RunPage("", f"{name}: {found.state}", *page.parts(found))

    def page(self, name: str) -> RunPage:
        """A run's page, drawn again where something that is kept has changed.

        Raises:
            ConfigError, StorageError: there is no such run, or storage refuses.
        """
        mark = self.mark(name)
        with self._drawing:  # of two that ask at once the second gets what the first has drawn
            known = self._drawn(name, mark)
            if known is not None:
                return known
            uri = self.find(name).uri
            run, steps = history.load(uri), None
            with contextlib.suppress(StorageError):  # a page without that curve is better than none
                steps = run_log.read_steps(uri)
            made = RunPage(mark, f"{name}: {run.state}", *page.parts(run, steps))
            self._pages[name] = made
            while len(self._pages) > _PAGES:
                del self._pages[next(iter(self._pages))]
            return made

    def _drawn(self, name: str, mark: str) -> RunPage | None:
        """A run's page as it was drawn last, if nothing that is kept has changed: a sign of life changes its head."""
        known = self._pages.get(name)
        return known if known is not None and known.mark.partition("\n")[0] == mark.partition("\n")[0] else None

    def search(self, name: str) -> dict[str, Any]:
        """The trials of a search that are over, as JSON.

        Raises:
            ConfigError, StorageError: there is no such search, or storage refuses.
        """
        search, trials = self.find(name), []
        for file in search.list(f"{SEARCH}/{TRIALS}"):
            found, _ = untrusted_json.attempt(
                lambda file=file: untrusted_json.read(search, f"{SEARCH}/{TRIALS}/{file}", RECORD, untrusted_json.LARGE)  # type: ignore[misc]
            )
            if found is not None:
                kept = ("number", "parameters", "outcome", "value", "epochs", "why")
                trials.append({key: found.get(key) for key in kept})
        return {"name": name, "trials": sorted(trials, key=lambda trial: trial["number"])}


def row(run: Run) -> dict[str, Any]:
    """A run of the list, as JSON."""
    goal = inventory.main_goal(list(run.epochs))
    curve = [] if goal is None else [value for e in run.epochs if isinstance(value := e.get(goal.metric), float)]
    return {
        "name": run.name,
        "state": run.state.value,
        "why": run.why,
        "step": run.step,
        "total": run.total,
        "metric": run.metric,
        "best": run.best,
        "last": run.last,
        "modified": run.modified,
        "problems": list(run.problems),
        "trials": run.trials,
        "metrics": learning.metrics_of(run.epochs),
        "curve": _thin(curve),
    }


def _thin(values: Sequence[float]) -> list[float]:
    count = min(len(values), _SPARK_POINTS)
    kept = [values[i * len(values) // count] for i in range(count)]
    return [float(f"{value:.4g}") for value in kept if math.isfinite(value)]


def keep_fresh(gallery: Gallery, seconds: float, over: threading.Event) -> None:
    """Read the list again and again; a storage that does not answer is asked again."""
    while not over.wait(seconds):
        began = time.monotonic()
        try:
            gallery.refresh()
        except StorageError:
            over.wait(seconds)
        over.wait(min(30.0, 2 * (time.monotonic() - began)))  # a third of the time at most
