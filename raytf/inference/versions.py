"""Version folders of TensorFlow Serving: lists and checks them, and publishes new ones.

    MODELS/1/saved_model.pb  variables/  assets.extra/raytf.json
    MODELS/2/...

A version appears only when it is complete. On a file system, it is written under another name and renamed. An object
store cannot rename, so the order of writes matters: TensorFlow Serving recognizes a model by its `saved_model.pb`,
which is written last, after the mark that lists every file with its size.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from raytf.errors import ConfigError, DamagedFileError, StorageError
from raytf.storage import claims, untrusted_json, uris
from raytf.storage.local_files import is_plain
from raytf.storage.refusals import explain
from raytf.storage.storage import Storage

#: Files by which TensorFlow Serving recognizes a model.
GRAPHS = ("saved_model.pb", "saved_model.pbtxt")
#: In the folder of a SavedModel that TensorFlow leaves to other programs.
MARK = "assets.extra/raytf.json"
#: In an object store: a file for each version that is being written.
_CLAIM = ".raytf-claim-"
_TEMPORARY = ".tmp-"
#: Seconds after which the remains of a killed export are deleted.
_STALE_SECONDS = 6 * 3600.0
_WRITERS = 8
_MOST = 2**63 - 1
_MARK = untrusted_json.record(
    {"files": untrusted_json.values(untrusted_json.whole)},
    {
        "run": untrusted_json.text,
        "step": untrusted_json.optional(untrusted_json.whole),
        "weights_sha256": untrusted_json.optional(untrusted_json.text),
    },
)


@dataclass(frozen=True)
class Version:
    """A version folder.

    Attributes:
        number: the version number.
        name: name of the folder; TensorFlow Serving reads 00000123 as 123.
        problem: the reason why it cannot be served; empty if it is whole.
        sizes: bytes of each file.
        notes: run, step and weights_sha256 from the mark; empty for models of other programs.
    """

    number: int
    name: str
    problem: str
    sizes: Mapping[str, int]
    notes: Mapping[str, Any] = field(default_factory=dict)


def number_of(name: str) -> int | None:
    """Return the version number that a folder's name stands for, or None if it stands for none."""
    if not (name.isascii() and name.isdigit()):
        return None
    digits = name.lstrip("0") or "0"
    number = int(digits) if len(digits) <= len(str(_MOST)) else _MOST + 1
    return number if number <= _MOST else None


def inspect(models: Storage, known: Iterable[Version] = ()) -> list[Version]:
    """Return all version folders, the newest first.

    Args:
        known: whole versions from an earlier call, which are read again only if the sizes of their files differ.

    Raises:
        StorageError: storage refuses.
    """
    folders: dict[str, dict[str, int]] = {}
    for file in models.files():
        name, _, inner = file.name.partition("/")
        if inner and number_of(name) is not None:
            folders.setdefault(name, {})[inner] = file.bytes
    before = {version.name: version for version in known if not version.problem}
    versions = [
        before[name] if name in before and before[name].sizes == sizes else _read(models, name, sizes)
        for name, sizes in folders.items()
    ]
    return sorted(versions, key=lambda version: (version.number, version.name), reverse=True)


def whole(versions: Iterable[Version]) -> list[Version]:
    """Return the versions that can be served, one for each number, in the same order."""
    return list({v.number: v for v in versions if not v.problem}.values())


def choose(models: Storage, numbers: Collection[int]) -> list[Version]:
    """Return the versions that can be served, the newest first; these numbers must be among them.

    Raises:
        ConfigError: a number is missing, or there is no version that can be served.
        StorageError: storage refuses.
    """
    every = inspect(models)
    good = whole(every)
    there = [version.number for version in reversed(good)]
    for number in sorted(set(numbers) - set(there)):
        why = next((f": {version.problem}" for version in every if version.number == number), "")
        known = ", ".join(map(str, there)) or "none"
        raise ConfigError(f"version {number} is not in {models.locate('')}{why}. Versions there: {known}.")
    if not good:
        why = next((f": {version.problem}" for version in every), "")
        raise ConfigError(f"{models.locate('')} has no whole version{why}.")
    return good


def problem_of(sizes: Mapping[str, int], marked: Mapping[str, int] | None) -> str:
    """Return why a folder is not a whole model, or an empty text if it is one.

    Args:
        sizes: bytes of each file in it.
        marked: bytes of each file according to the mark; None without a mark.
    """
    if not any(graph in sizes for graph in GRAPHS):
        return f"{GRAPHS[0]} is missing: the version is being written, or its export was killed"
    for name in sizes:
        if not is_plain(name):
            return f"it has a file named {name!a}, which is not a plain relative name"
    for name, size in sorted((marked or {}).items()):
        if name not in sizes:
            return f"{name} is missing"
        if sizes[name] != size:
            return f"{name} has {sizes[name]} of {size} bytes"
    return ""


def publish(folder: str, models: Storage, notes: Mapping[str, Any]) -> Version:
    """Make a local SavedModel the next version.

    Args:
        folder: the folder of the SavedModel; a mark is added to it.
        models: the folder of versions; created if it does not exist.
        notes: JSON values for the mark.

    Raises:
        StorageError: storage refuses; no version was added.
    """
    sizes = {name: os.path.getsize(os.path.join(folder, name)) for name in _files(folder)}
    sizes.pop(MARK, None)
    mark = json.dumps({**notes, "files": sizes, "time": time.time()}, sort_keys=True, indent=1).encode()
    place = Path(folder, MARK)
    place.parent.mkdir(exist_ok=True)
    place.write_bytes(mark)
    number = _rename_into(folder, models) if models.is_local else _upload(folder, models)
    return Version(number, str(number), "", {**sizes, MARK: len(mark)}, dict(notes))


def download(models: Storage, version: Version, folder: str) -> None:
    """Copy a version into a local folder.

    Raises:
        StorageError: storage refuses, or the version is gone, or a name in it would lead out of the folder.
    """
    models.download(version.name, version.sizes, folder, at_once=_WRITERS)


@contextlib.contextmanager
def local_copy(models: Storage, version: Version) -> Iterator[str]:
    """Yield the local folder of a version, or a temporary local copy that is deleted when the context ends.

    Raises:
        StorageError: as `download`.
    """
    if models.is_local:
        yield models.locate(version.name)
        return
    with tempfile.TemporaryDirectory(prefix="raytf-model-") as folder:
        download(models, version, folder)
        yield folder


def models_of(uri: str) -> tuple[Storage, str, int | None]:
    """Return the folder of versions at a URI, the model's name, and the version if the URI names one.

    Args:
        uri: a run, a folder of versions, or one version's folder.

    Raises:
        ConfigError: there is no model; the message says how to export one.
        StorageError: storage refuses.
    """
    place = Storage(uri)
    names = place.list()
    if any(graph in names for graph in GRAPHS):
        parent, last = _split(uri)
        number = number_of(last)
        if number is None:
            raise ConfigError(
                f"{place.locate('')} is a SavedModel, but {last!r} is not a version number. TensorFlow "
                "Serving expects MODEL/1. Move the SavedModel to such a folder."
            )
        return Storage(parent), name_of(parent), number
    if any(number_of(name.rstrip("/")) is not None for name in names):
        return place, name_of(uri), None
    if "export/" in names and any(number_of(name.rstrip("/")) is not None for name in place.list("export")):
        return place.child("export"), name_of(uri), None
    if not names:
        raise ConfigError(
            f"there is nothing in {place.locate('')}. Expected a run, STORAGE/NAME, or a folder of versions."
        )
    raise ConfigError(
        f"{place.locate('')} has no exported model. Expected a run with export/1, or a folder of versions such as "
        f"MODEL/1. `raytf export {place.locate('')}` exports the newest checkpoint of a run."
    )


def name_of(uri: str) -> str:
    """Return a model's name from its location: the name of the run, or of the folder of versions."""
    parent, last = _split(uri)
    return (_split(parent)[1] or last) if last == "export" else last


def _split(uri: str) -> tuple[str, str]:
    is_folder = uris.is_folder(uri)
    base, mark, query = (os.path.abspath(os.path.expanduser(uri)), "", "") if is_folder else uri.partition("?")
    parent, _, last = base.rstrip("/").rpartition("/")
    return f"{parent}{mark}{query}", last


def _read(models: Storage, name: str, sizes: dict[str, int]) -> Version:
    number, marked, notes = int(name), None, {}
    if MARK in sizes:
        try:
            notes = untrusted_json.read(models, f"{name}/{MARK}", _MARK, untrusted_json.LARGE)
        except DamagedFileError as error:
            return Version(number, name, f"{MARK} cannot be read: {error.reason}", sizes)
        if notes is None:
            return Version(number, name, "it was deleted just now", sizes)
        marked = notes.pop("files")
    return Version(number, name, problem_of(sizes, marked), sizes, notes)


def _files(folder: str) -> list[str]:
    bases = ((base, name) for base, _, names in os.walk(folder) for name in names)
    return sorted(os.path.relpath(os.path.join(base, name), folder).replace(os.sep, "/") for base, name in bases)


def _next(names: Iterable[str]) -> int:
    numbers = [number_of(name.rstrip("/").removeprefix(_CLAIM)) for name in names]
    return 1 + max((number for number in numbers if number is not None), default=0)


def _rename_into(folder: str, models: Storage) -> int:
    base = models.root
    try:
        os.makedirs(base, exist_ok=True)
        temporary = os.path.join(base, f"export{_TEMPORARY}{uuid.uuid4().hex[:8]}")
        try:
            os.mkdir(temporary)
            _clean_folder(base, os.stat(temporary).st_mtime)
            shutil.copytree(folder, temporary, dirs_exist_ok=True)
            os.utime(temporary)  # copytree copied the time of the folder, too: an old model would be stale at once
            for name in _files(temporary):
                _flush(os.path.join(temporary, name))
            while True:
                number = _next(os.listdir(base))
                try:
                    os.rename(temporary, os.path.join(base, str(number)))
                    _flush(base)
                    return number
                except OSError:
                    if not os.path.exists(os.path.join(base, str(number))):
                        raise  # no other export took the number
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise explain("write", base, error) from error


def _flush(path: str) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _clean_folder(base: str, now: float) -> None:
    """Delete the remains of killed exports in a folder; `now` is its file system's time, not this machine's."""
    for name in os.listdir(base):
        path = os.path.join(base, name)
        with contextlib.suppress(OSError):
            if name.startswith(f"export{_TEMPORARY}") and now - os.stat(path).st_mtime > _STALE_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _upload(folder: str, models: Storage) -> int:
    while True:
        number = _next(models.list())
        claim = f"{_CLAIM}{number}"
        if not claims.write(models, claim, b"", None):
            continue
        # Another export may have claimed, written and released the number since the list was read.
        if not models.files(str(number)):
            break
        models.delete(claim)
    _clean_store(models, claim)
    files = _files(folder)
    last = [name for name in files if name in GRAPHS]

    def put(name: str) -> None:
        models.put(f"{number}/{name}", Path(folder, name).read_bytes())

    try:
        with ThreadPoolExecutor(_WRITERS) as pool:
            list(pool.map(put, [name for name in files if name not in last]))
        for name in last:
            put(name)
    except BaseException:
        with contextlib.suppress(StorageError):
            models.delete(str(number))
            models.delete(claim)
        raise
    with contextlib.suppress(StorageError):
        models.delete(claim)
    return number


def _clean_store(models: Storage, own: str) -> None:
    """Delete partial versions and claims of killed exports; `own`, a new claim, shows the store's time."""
    with contextlib.suppress(StorageError):
        files = models.files()
        now = max((file.modified for file in files if file.name == own), default=0.0)
        for claim in files:
            if claim.name.startswith(_CLAIM) and now - claim.modified > _STALE_SECONDS:
                name = claim.name.removeprefix(_CLAIM)
                if not any(file.name == f"{name}/{graph}" for file in files for graph in GRAPHS):
                    models.delete(name)
                models.delete(claim.name)
