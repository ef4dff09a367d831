"""The addresses at which this user's `raytf ui` processes show storages, so that a run can print its page."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

from raytf._process import process_start
from raytf.config.flags import RunSection
from raytf.storage import untrusted_json
from raytf.storage.storage import Storage

_SHAPE = untrusted_json.record(
    {
        "pid": untrusted_json.whole,
        "started": untrusted_json.text,
        "url": untrusted_json.text,
        "root": untrusted_json.text,
    }
)
#: The most notes that are read: each running `raytf ui` has one, and killed ones leave theirs behind.
_MOST = 100


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "raytf" / "ui"


@contextlib.contextmanager
def announced(url: str, root: str) -> Iterator[None]:
    """Leave a note of the pages' address for this user's other processes during the `with` block, if possible.

    Args:
        url: address of the pages, without a token.
        root: URI of the storage that the pages show.
    """
    pid = os.getpid()
    path = _folder() / f"{pid}.json"
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        note = {"pid": pid, "started": process_start(pid), "url": url, "root": root}
        path.write_text(json.dumps(note))
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            path.unlink()


def page_of(uri: str) -> str | None:
    """Return the address of the page of the run in the folder `uri`; None if no `raytf ui` shows it."""
    with contextlib.suppress(OSError):
        for path in sorted(_folder().glob("*.json"))[:_MOST]:
            try:
                note = untrusted_json.decode(path.read_bytes())
            except ValueError:
                continue
            if _SHAPE(note) or process_start(note["pid"]) != note["started"]:
                continue
            root = note["root"].rstrip("/")
            if uri.startswith(f"{root}/"):
                return f"{note['url']}run/{quote(uri.removeprefix(f'{root}/'))}"
    return None


def command_for(run: Storage) -> str:
    """Return the command that shows a run's page."""
    place = run.locate("").rstrip("/").rpartition("/")[0] or "/"
    is_usual = place == Storage(RunSection().storage).locate("").rstrip("/")
    return "raytf ui" if is_usual else f"raytf ui {shlex.quote(place)}"
