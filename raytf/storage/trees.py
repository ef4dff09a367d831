"""Folders with all that is in them, from a local disk to storage and back."""

from __future__ import annotations

import os
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor

from raytf.storage import local_files, local_names
from raytf.storage.refusals import explain
from raytf.storage.storage import Storage


def put(storage: Storage, folder: str, name: str) -> None:
    """Copy a local folder's files to below `name`."""
    for base, _, files in os.walk(folder):
        for file in files:
            path = os.path.join(base, file)
            relative = os.path.relpath(path, folder).replace(os.sep, "/")
            with open(path, "rb") as stream:
                storage.put(f"{name}/{relative}", stream.read())


def get(storage: Storage, name: str, folder: str) -> None:
    """Copy the files below `name` into a local folder.

    Raises:
        StorageError: also where a name would lead out of the folder; then nothing is written.
    """
    download(storage, name, [file for file in storage.list(name, recursive=True) if file[-1:] != "/"], folder)


def download(storage: Storage, name: str, files: Collection[str], folder: str, at_once: int = 1) -> None:
    """Copy some of the files below `name` into a local folder; see `get`.

    Args:
        at_once: files that are read at the same time.
    """
    for relative in files:
        local_names.check_plain(relative, storage.locate(name))

    def fetch(relative: str) -> None:
        data = storage.get(f"{name}/{relative}")
        try:
            local_files.put_inside(folder, relative, data)
        except OSError as error:
            raise explain("write", os.path.join(folder, relative), error) from error

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(fetch, files))
