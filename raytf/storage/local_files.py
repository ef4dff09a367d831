"""Files on a local or network file system, with atomic writes, exclusive creation and locked swaps.

An object store accepts any text as a name: `../../etc/passwd`, `/etc/passwd`, `a//b`. On a file system, such a name
leads out of its folder or to a file with another name, so `check_plain` refuses it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from raytf.errors import StorageError

#: Flushes the file or folder behind a file descriptor to disk.
Sync = Callable[[int], None]

#: How long a swap waits for another one.
_LOCK_SECONDS = 5.0
#: Bytes per read of a file that is growing.
_PIECE = 1 << 20
_DRIVE = re.compile(r"[A-Za-z]:")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_MOST_SHOWN = 200


@dataclass(frozen=True)
class StoredFile:
    """A file in storage.

    Attributes:
        name: relative to the folder that was listed.
        bytes: its size.
        modified: seconds since the epoch, by the store's clock.
    """

    name: str
    bytes: int
    modified: float


def leads_elsewhere(name: str) -> bool:
    """Return whether any '/'-separated part of a name has a special meaning to a file system or library."""
    return "\0" in name or any(part in ("", ".", "..") for part in name.split("/"))


def is_plain(name: str) -> bool:
    """Return whether a name refers to the same file below a folder on every file system."""
    return not (leads_elsewhere(name) or "\\" in name or _DRIVE.match(name) or _CONTROL.search(name))


def check_plain(name: str, where: str) -> None:
    """Check that a name is plain.

    Args:
        where: the folder that contains it, as shown to people.

    Raises:
        StorageError: the name is not plain.
    """
    if not is_plain(name):
        raise refused_name(name, where)


def refused_name(name: str, where: str) -> StorageError:
    """Return the error for a name that is not plain."""
    shown = ascii(name)  # raw characters may control the terminal
    if len(shown) > _MOST_SHOWN:
        shown = f"{shown[:_MOST_SHOWN]}..."
    return StorageError(
        f"{where} has a file with the name {shown}, which is not a plain relative name (such as a/b.txt) and could be "
        "written outside its folder. Nothing was written. Delete or rename the file.",
        "refused",
    )


def get(path: str, most: int | None = None) -> bytes:
    """Return the bytes of a file.

    Args:
        most: the largest size; a larger file is not read.

    Raises:
        OSError: it is too large, or not a regular file (reading a pipe could block forever).
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.ENXIO, "it is not a regular file", path)
        if most is None:
            return file.read()
        # Allocate memory for the current size, not for the largest one.
        data = b"" if status.st_size > most else file.read(status.st_size + 1)
        while status.st_size < len(data) <= most and (piece := file.read(_PIECE)):  # the file is growing
            data += piece
        if status.st_size > most or len(data) > most:
            raise too_large(max(status.st_size, len(data)), most, path)
        return data


def too_large(size: int, most: int, path: str) -> OSError:
    """Return the error for a file that is larger than raytf would have written it."""
    return OSError(errno.EOVERFLOW, f"it has {size:,} bytes or more, but at most {most:,} are allowed", path)


def exists(path: str) -> bool:
    """Return whether a path is a regular file.

    Raises:
        OSError: the path cannot be inspected.
    """
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise


def walk(base: str, deep: bool = True, skipped: list[str] | None = None) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield everything below a folder as (name relative to it, entry). Links to folders are not followed.

    A folder that is missing, or is deleted during the walk, counts as empty.

    Args:
        deep: whether to enter subfolders.
        skipped: receives the names of folders that cannot be read.

    Raises:
        OSError: `base` cannot be read, or another folder cannot be read and there is no `skipped`.
    """
    folders = [""]
    while folders:  # os.walk recurses once per level, and there may be thousands
        prefix = folders.pop()
        try:
            with os.scandir(f"{base}/{prefix}") as scan:
                entries = list(scan)
        except FileNotFoundError:
            continue
        except OSError:
            if not prefix or skipped is None:
                raise
            skipped.append(prefix.rstrip("/"))
            continue
        for entry in entries:
            yield f"{prefix}{entry.name}", entry
            if deep and entry.is_dir(follow_symlinks=False):
                folders.append(f"{prefix}{entry.name}/")


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return whether an entry is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # a cycle of links
        return False


def status_of(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Return the size and time of an entry or of a link's target; None if it was deleted."""
    try:
        return entry.stat()
    except FileNotFoundError:
        return None
    except OSError:
        with contextlib.suppress(OSError):
            return entry.stat(follow_symlinks=False)
        return None


def files(base: str, skipped: list[str] | None) -> list[StoredFile]:
    """Return all files below a folder. Add the names of unreadable folders to `skipped`, or raise if it is None."""
    # pyarrow fails to list a local folder while another process deletes files in it, as a live run does, and fails on
    # names that are not text.
    entries = [(name, entry) for name, entry in walk(base, True, skipped) if not is_folder(entry)]
    known = [(name, status) for name, entry in entries if (status := status_of(entry)) is not None]
    return [StoredFile(name, status.st_size, status.st_mtime) for name, status in known]


def names(base: str) -> list[str]:
    """Return the names in a folder, sorted; folders end with '/'."""
    entries = ((name, is_folder(entry)) for name, entry in walk(base, deep=False) if ".tmp-" not in name)
    return sorted(name + ("/" if is_folder else "") for name, is_folder in entries)


def put(path: str, data: bytes | memoryview | Sequence[memoryview], sync: Sync = os.fsync) -> None:
    """Write a file from its data or pieces; it appears, or replaces the old file, once it is complete and on disk."""
    with _complete(path, [data] if isinstance(data, (bytes, memoryview)) else data, sync) as temporary:
        os.replace(temporary, path)


def put_inside(folder: str, name: str, data: bytes) -> None:
    """Write a file below a folder at a plain relative name, replacing an existing file.

    No link below the folder is followed: a link in place of the file is replaced, in place of a folder it is an error.

    Raises:
        OSError: also if a file or a link is where a folder is needed.
    """
    *folders, last = name.split("/")
    os.makedirs(folder, exist_ok=True)
    base = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for part in folders:
            with contextlib.suppress(FileExistsError):
                os.mkdir(part, dir_fd=base)
            inner = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=base)
            os.close(base)
            base = inner
        temporary = f".tmp-{uuid.uuid4().hex[:8]}"
        # Never write in place: the file may be a hard link to another one.
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666, dir_fd=base)
        try:
            with open(handle, "wb") as out:
                out.write(data)
            os.replace(temporary, last, src_dir_fd=base, dst_dir_fd=base)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary, dir_fd=base)
            raise
    finally:
        os.close(base)


def delete(root: str, name: str, sync: Sync = os.fsync) -> None:
    """Delete a file or a folder below `root`, if it exists and none of its parent folders is a link.

    For a link, only the link is deleted, not its target.
    """
    path = root
    for part in filter(None, name.split("/")):
        if path != root and os.path.islink(path):
            return
        path = f"{path}/{part}"
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
        return
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        os.unlink(path)
        _sync_folder(os.path.dirname(path), sync)  # on disk before the caller deletes files that this one refers to
    drop_lock(path)


def create(path: str, data: bytes, sync: Sync = os.fsync) -> bool:
    """Write a file, complete and on disk, unless it exists. Return whether it was written."""
    with _complete(path, [data], sync) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    return True


@contextlib.contextmanager
def _complete(path: str, pieces: Sequence[bytes | memoryview], sync: Sync) -> Iterator[str]:
    """Write a temporary file beside `path`; the body of the `with` statement gives it the name `path`.

    On exit, the file, its name and its new parent folders are on disk, and the temporary file is deleted.
    """
    folder = os.path.dirname(os.path.abspath(path))
    temporary = f"{path}.tmp-{uuid.uuid4().hex[:8]}"
    _make_folder(folder, sync)
    try:
        with open(temporary, "wb") as out:
            for piece in pieces:
                out.write(piece)
            out.flush()
            sync(out.fileno())
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
    _sync_folder(folder, sync)


def _make_folder(folder: str, sync: Sync) -> None:
    above, new = folder, []
    while not os.path.isdir(above):
        above = os.path.dirname(above)
        new.append(above)
    os.makedirs(folder, exist_ok=True)
    for parent in new:
        _sync_folder(parent, sync)


def _sync_folder(folder: str, sync: Sync) -> None:
    """Flush the names in a folder to disk; otherwise a power failure may lose the name of a file that is on disk."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # deleted already, or this user may write but not read it
        return
    try:
        sync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # this file system cannot sync folders
            raise
    finally:
        os.close(handle)


def version(data: bytes) -> str:
    """Return a text that identifies a file's content."""
    return hashlib.sha256(data).hexdigest()


def swap(path: str, data: bytes, expected: str) -> bool:
    """Write a file if it still has this version. Return whether it was written."""
    with _locked(path):
        try:
            before = get(path)
        except FileNotFoundError:
            return False
        if version(before) != expected:
            return False
        put(path, data)
        return True


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Hold a file's lock, which also works over NFS and is released when its process ends.

    Raises:
        OSError: another process held the lock for too long.
    """
    lock, deadline = _lock_of(path), time.monotonic() + _LOCK_SECONDS
    os.makedirs(os.path.dirname(path), exist_ok=True)
    while True:
        # A link or a pipe may be in the place of the lock.
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        with open(handle, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise OSError(
                        errno.EBUSY, "another process holds this lock; end that process if it is suspended", lock
                    ) from None
                time.sleep(0.02)
                continue
            except OSError:
                pass  # a file system without locks
            if _is_at(lock, handle):  # `drop_lock` has not deleted it in between
                yield
                return


def drop_lock(path: str) -> None:
    """Delete the lock that swaps leave beside a file, unless a swap is in progress."""
    lock = _lock_of(path)
    with contextlib.suppress(OSError):
        handle = os.open(lock, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(lock, handle):
                os.unlink(lock)


def _lock_of(path: str) -> str:
    return f"{path}.tmp-lock"


def _is_at(path: str, handle: int) -> bool:
    try:
        return os.path.samestat(os.stat(path, follow_symlinks=False), os.fstat(handle))
    except FileNotFoundError:
        return False
