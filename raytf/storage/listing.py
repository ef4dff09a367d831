"""Files on storage and their names, as lists show them."""

from __future__ import annotations

from dataclasses import dataclass

from raytf.storage import local_files


@dataclass(frozen=True)
class StoredFile:
    """A file on storage.

    Attributes:
        name: relative to the folder that was listed.
        bytes: its size.
        modified: seconds of the epoch, by the clock of the store.
    """

    name: str
    bytes: int
    modified: float


def relative(path: str, base: str) -> str:
    """A path below a folder without the folder's."""
    # One slash goes: a key such as `base//etc` has a name of its own, which begins with a slash.
    return path[len(base.rstrip("/")) + 1 :].removesuffix("/")


def local(base: str, skipped: list[str] | None) -> list[StoredFile]:
    """All files below a local folder.

    Args:
        skipped: takes the names of folders below it that cannot be read; without it the first one raises.
    """
    # pyarrow's list of a local folder fails when somebody deletes in it at the same time, as a live run does, and on
    # names that are no text.
    found = []
    for name, entry in local_files.walk(base, True, skipped):
        if not local_files.is_folder(entry) and (stat := local_files.look(entry)) is not None:
            found.append(StoredFile(name, stat.st_size, stat.st_mtime))
    return found


def local_names(base: str, recursive: bool) -> list[str]:
    """Names below a local folder, relative to it, sorted; folders end with '/'."""
    found = ((name, local_files.is_folder(entry)) for name, entry in local_files.walk(base, recursive))
    return sorted(name + ("/" if is_folder else "") for name, is_folder in found if ".tmp-" not in name)
