"""What is below a folder: names, and files with their sizes, on a local disk and on an object store."""

from __future__ import annotations

from dataclasses import dataclass

import pyarrow.fs as pafs

from raytf.storage import local_files as local


@dataclass(frozen=True)
class File:
    """A file on storage.

    Attributes:
        name: relative to the folder that was listed.
        bytes: its size.
        modified: seconds of the epoch, by the clock of the store.
    """

    name: str
    bytes: int
    modified: float


def local_files(base: str, skipped: list[str] | None = None) -> list[File]:
    """All files below a local folder, at any depth.

    Args:
        skipped: takes the names of folders that cannot be read; without it the first one raises.
    """
    # pyarrow's list of a local folder fails when somebody deletes in it at the same time, as a live run does, and on
    # names that are no text.
    found = []
    for name, entry in local.walk(base, True, skipped):
        if not local.is_folder(entry) and (stat := local.look(entry)) is not None:
            found.append(File(name, stat.st_size, stat.st_mtime))
    return found


def local_names(base: str, recursive: bool) -> set[str]:
    """Names below a local folder; folders end with '/'."""
    found = ((name, local.is_folder(entry)) for name, entry in local.walk(base, recursive))
    return {name + ("/" if is_folder else "") for name, is_folder in found if ".tmp-" not in name}


def objects(fs: pafs.FileSystem, base: str) -> list[File]:
    """All objects below a folder, at any depth."""
    selector = pafs.FileSelector(base, allow_not_found=True, recursive=True)
    infos = [info for info in fs.get_file_info(selector) if info.type == pafs.FileType.File]
    return [File(_relative(i.path, base), i.size, (i.mtime_ns or 0) / 1e9) for i in infos]


def object_names(fs: pafs.FileSystem, base: str, recursive: bool) -> set[str]:
    """Names below a folder of an object store; folders end with '/', and a recursive list may leave them out."""
    # pyarrow lists no folder on GCS that exists only through the objects in it, so there they are looked for.
    infer = not recursive and isinstance(fs, pafs.GcsFileSystem)
    found = set()
    for info in fs.get_file_info(pafs.FileSelector(base, allow_not_found=True, recursive=recursive or infer)):
        relative = _relative(info.path, base)
        if relative and ".tmp-" not in relative:
            found.add(relative + ("/" if info.type == pafs.FileType.Directory else ""))
    return {first + mark for first, mark, _ in (entry.partition("/") for entry in found)} if infer else found


def _relative(path: str, base: str) -> str:
    # One slash goes: a key such as `base//etc` has a name of its own, which begins with a slash.
    return path[len(base.rstrip("/")) + 1 :].removesuffix("/")
