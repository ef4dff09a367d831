"""Resolves the storages, runs and models that a user names."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from raytf.config.flags import RunSection
from raytf.errors import ConfigError
from raytf.runs import run_folder
from raytf.storage.storage import PREFLIGHT_SECONDS, Storage, within

_NAME = re.compile(r"[\w\-+=@][\w.\-+=@]*(/[\w\-+=@][\w.\-+=@]*)?")
#: The default storage of runs.
USUAL = RunSection().storage
#: Entries that identify a folder as a run.
RUN_MARKS = frozenset({"checkpoints", "attempts", "result.json", "ledger", run_folder.SEARCH})


def run_uri(text: str) -> str:
    """Return the folder of a run: as typed, or in ~/raytf-runs for a name that `raytf runs` lists.

    A folder of that name in the current folder takes precedence, unless only ~/raytf-runs has a run of that name.
    """
    known = f"{USUAL}/{text}"
    is_hidden = _NAME.fullmatch(text) and _is_run(os.path.expanduser(known)) and not _is_run(text)
    return known if is_hidden else model_uri(text)


def model_uri(text: str) -> str:
    """Return the place of a model: as typed, or a run in ~/raytf-runs if no file or folder here has the name."""
    return f"{USUAL}/{text}" if _NAME.fullmatch(text) and not os.path.exists(text) else text


def answering(uri: str) -> Storage:
    """Return a storage after listing it once.

    Raises:
        StorageError: the storage refuses, or does not answer in time.
    """
    storage = Storage(uri)
    within(PREFLIGHT_SECONDS, storage.list, storage.locate(""))
    return storage


def filled_run(text: str) -> Storage:
    """Return the folder of a run after checking that it is not empty.

    Raises:
        ConfigError: the folder is empty or does not exist.
        StorageError: the storage refuses, or does not answer in time.
    """
    run = Storage(run_uri(text))
    if not within(PREFLIGHT_SECONDS, run.list, run.locate("")):
        raise ConfigError(
            f"there is nothing in {run.locate('')}. Expected the folder of a run, STORAGE/NAME; `raytf runs STORAGE` "
            "lists all runs."
        )
    return run


def _is_run(place: str) -> bool:
    """Return whether a local folder is a run, a search, or a program's folder of runs."""
    entries = _entries(place)
    return any(not RUN_MARKS.isdisjoint(names) for names in (entries, *_inner(place, entries)))


def _inner(place: str, entries: set[str]) -> Iterator[set[str]]:
    return (_entries(os.path.join(place, entry)) for entry in entries if entry.isdecimal())


def _entries(place: str) -> set[str]:
    try:
        return set(os.listdir(place))
    except OSError:
        return set()
