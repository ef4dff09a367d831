"""The places that a person names: storages, runs and models."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

from raytf.config.flags import RunSection
from raytf.errors import ConfigError
from raytf.runs import run_folder
from raytf.storage.storage import PREFLIGHT_SECONDS, Storage, within

_NAME = re.compile(r"[\w\-+=@][\w.\-+=@]*(/[\w\-+=@][\w.\-+=@]*)?")
#: The default place of runs.
USUAL = RunSection().storage
#: Entries by which a folder is known as a run.
RUN_MARKS = frozenset({"checkpoints", "attempts", "result.json", "ledger", run_folder.SEARCH})


def run_uri(text: str) -> str:
    """Return the folder of a run: as typed, or, for a name as `raytf runs` lists it, that run in ~/raytf-runs.

    A folder of that name in the current one comes first, unless it is no run and ~/raytf-runs has a run of that name.
    """
    known = f"{USUAL}/{text}"
    is_hidden = _NAME.fullmatch(text) and _is_run(os.path.expanduser(known)) and not _is_run(text)
    return known if is_hidden else model_uri(text)


def model_uri(text: str) -> str:
    """Return the place of a model: as typed, or, for a name that is no file or folder here, a run in ~/raytf-runs."""
    return f"{USUAL}/{text}" if _NAME.fullmatch(text) and not os.path.exists(text) else text


def answering(uri: str) -> Storage:
    """Return a storage that can be listed.

    Raises:
        StorageError: it refuses, or does not answer soon.
    """
    storage = Storage(uri)
    within(PREFLIGHT_SECONDS, storage.list, storage.locate(""))
    return storage


def filled_run(text: str) -> Storage:
    """Return the folder of a run that has anything in it.

    Raises:
        ConfigError: it is empty, or is not there.
        StorageError: storage refuses, or does not answer soon.
    """
    run = Storage(run_uri(text))
    if not within(PREFLIGHT_SECONDS, run.list, run.locate("")):
        raise ConfigError(
            f"there is nothing in {run.locate('')}. Expected the folder of a run, STORAGE/NAME; `raytf runs STORAGE` "
            "lists them."
        )
    return run


def _is_run(place: str) -> bool:
    """Return whether a local folder is that of a run, of a search, or of the runs of a program."""
    entries = _entries(place)
    return any(not RUN_MARKS.isdisjoint(names) for names in (entries, *_inner(place, entries)))


def _inner(place: str, entries: set[str]) -> Iterator[set[str]]:
    return (_entries(os.path.join(place, entry)) for entry in entries if entry.isdecimal())


def _entries(place: str) -> set[str]:
    try:
        return set(os.listdir(place))
    except OSError:
        return set()
