"""What pyarrow does with objects of a store: reads them, lists them, deletes them one by one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pyarrow.fs as pafs

from raytf.storage import local_files
from raytf.storage.listing import StoredFile, relative

#: Files that are deleted at the same time where each is a request.
_DELETES = 8


def read(system: pafs.FileSystem, path: str, most: int | None) -> bytes:
    """The bytes of an object.

    Args:
        most: bytes that it may have; a larger one is damaged, and is not read.

    Raises:
        DamagedFileError: it is too large.
    """
    with system.open_input_stream(path, buffer_size=1 << 20) as stream:
        if most is None:
            return stream.read()
        try:
            data = stream.read(most + 1)
        except MemoryError:  # what a manifest says may be more than there is room for
            raise local_files.too_large(most, most - 1, path) from None
    if len(data) > most:
        raise local_files.too_large(len(data), most, path)
    return data


def files(system: pafs.FileSystem, base: str) -> list[StoredFile]:
    """All objects below BUCKET/PREFIX; none where there is no such folder."""
    selector = pafs.FileSelector(base, allow_not_found=True, recursive=True)
    infos = [info for info in system.get_file_info(selector) if info.type == pafs.FileType.File]
    return [StoredFile(relative(i.path, base), i.size, (i.mtime_ns or 0) / 1e9) for i in infos]


def names(system: pafs.FileSystem, base: str, recursive: bool) -> list[str]:
    """Names below BUCKET/PREFIX, relative to it, sorted; folders end with '/'."""
    # pyarrow lists no folder on GCS that exists only through the objects in it, so there they are looked for.
    infer = not recursive and isinstance(system, pafs.GcsFileSystem)
    selector = pafs.FileSelector(base, allow_not_found=True, recursive=recursive or infer)
    found = set()
    for info in system.get_file_info(selector):
        short = relative(info.path, base)
        if short and ".tmp-" not in short:
            found.add(short + ("/" if info.type == pafs.FileType.Directory else ""))
    if infer:
        found = {first + mark for first, mark, _ in (entry.partition("/") for entry in found)}
    return sorted(found)


def delete(system: pafs.FileSystem, path: str) -> None:
    """Delete an object, or all below a folder; nothing happens where nothing is."""
    info = system.get_file_info(path)
    if info.type == pafs.FileType.File:
        system.delete_file(path)
        return
    # File by file: `delete_dir` fails on some GCS implementations.
    selector = pafs.FileSelector(path, allow_not_found=True, recursive=True)
    files = [inner.path for inner in system.get_file_info(selector) if inner.type == pafs.FileType.File]
    with ThreadPoolExecutor(_DELETES) as pool:
        list(pool.map(system.delete_file, files))
