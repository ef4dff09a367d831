"""Files on a local or network file system: written whole or not at all, created once, swapped one at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator, Sequence

#: Writes what a file descriptor stands for to disk.
Sync = Callable[[int], None]

#: How long a swap waits for another one.
_LOCK_SECONDS = 5.0
#: Read at a time of a file that grows.
_PIECE = 1 << 20


def get(path: str, most: int | None = None) -> bytes:
    """The bytes of a file.

    Args:
        most: bytes that it may have; a larger one is not read.

    Raises:
        OSError: it is none, or too large; a pipe, for which a reader would wait for ever, is none.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        found = os.fstat(handle)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.ENXIO, "it is not a regular file", path)
        if most is None:
            return file.read()
        # Room is made for what is there, and not for what there may be at the most.
        data = b"" if found.st_size > most else file.read(found.st_size + 1)
        while found.st_size < len(data) <= most and (piece := file.read(_PIECE)):  # it grows
            data += piece
        if found.st_size > most or len(data) > most:
            raise too_large(max(found.st_size, len(data)), most, path)
        return data


def too_large(size: int, most: int, path: str) -> OSError:
    """What is raised for a file that is not read since it is larger than any that raytf writes there."""
    return OSError(errno.EOVERFLOW, f"it has {size:,} bytes or more, and at most {most:,} are read", path)


def exists(path: str) -> bool:
    """Whether there is a file; a folder is none.

    Raises:
        OSError: that cannot be known.
    """
    try:
        return stat.S_ISREG(os.stat(path).st_mode)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return False
        raise


def walk(base: str, deep: bool = True, skipped: list[str] | None = None) -> Iterator[tuple[str, os.DirEntry[str]]]:
    """All that is below a folder, as (name relative to it, entry); links to folders are not followed. A missing folder
    is empty, and so is one that is deleted meanwhile.

    Args:
        deep: folders in it as well.
        skipped: takes the names of those that cannot be read.

    Raises:
        OSError: a folder cannot be read, and `skipped` is not given or it is the first.
    """
    folders = [""]
    while folders:  # os.walk calls itself for each level, of which there may be thousands
        prefix = folders.pop()
        try:
            with os.scandir(f"{base}/{prefix}") as found:
                entries = list(found)
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
    """Whether an entry is a folder, or a link to one."""
    try:
        return entry.is_dir()
    except OSError:  # links that go round in a circle
        return False


def look(entry: os.DirEntry[str]) -> os.stat_result | None:
    """Size and time of an entry, of what a link leads to.

    Returns:
        None where that is gone.
    """
    try:
        return entry.stat()
    except FileNotFoundError:
        return None
    except OSError:
        with contextlib.suppress(OSError):
            return entry.stat(follow_symlinks=False)
        return None


def put(path: str, data: bytes | memoryview | Sequence[memoryview], sync: Sync = os.fsync) -> None:
    """Write a file, or the pieces of one; it appears, or replaces another one, only when it is complete and on disk."""
    with _complete(path, [data] if isinstance(data, (bytes, memoryview)) else data, sync) as temporary:
        os.replace(temporary, path)


def put_inside(folder: str, name: str, data: bytes) -> None:
    """Write a file below a folder, at a plain relative name (see `names`), whatever lies there already.

    Links below the folder are not followed: one in the place of the file is replaced, one on the way to it is an error.

    Raises:
        OSError: also where a file or a link is in the place of a folder.
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
        # Never in place: the file may be another one's hard link.
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
    """Delete what has a name below a folder; nothing happens where it is not there, or is not of that folder since a
    link leads out of it. Of a link the link goes, and not what it leads to."""
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
        _sync_folder(os.path.dirname(path), sync)  # before what the file speaks of is deleted
    drop_lock(path)


def create(path: str, data: bytes, sync: Sync = os.fsync) -> bool:
    """Write a file, complete and on disk, unless there is one; whether it was written."""
    with _complete(path, [data], sync) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
    return True


@contextlib.contextmanager
def _complete(path: str, pieces: Sequence[bytes | memoryview], sync: Sync) -> Iterator[str]:
    """Write a file of another name beside `path`, to be given that name inside the `with` statement.

    The file, the name that it was given and new folders above it are on disk at the end; nothing else is left.
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
    for each in new:
        _sync_folder(each, sync)


def _sync_folder(folder: str, sync: Sync) -> None:
    """Have the names in a folder last through a power cut: a file that is on disk may lack a name otherwise."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:  # gone already, or one in which this user may write and not read
        return
    try:
        sync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):  # a file system that cannot
            raise
    finally:
        os.close(handle)


def version(data: bytes) -> str:
    """What tells a file's bytes from those before and after."""
    return hashlib.sha256(data).hexdigest()


def swap(path: str, data: bytes, expected: str) -> bool:
    """Write a file that is still of a version; whether it was written."""
    with _locked(path):
        try:
            found = get(path)
        except FileNotFoundError:
            return False
        if version(found) != expected:
            return False
        put(path, data)
        return True


@contextlib.contextmanager
def _locked(path: str) -> Iterator[None]:
    """Alone among processes that ask for it, also over NFS; the lock ends with its process.

    Raises:
        OSError: another process has held it for seconds.
    """
    lock, deadline = _lock_of(path), time.monotonic() + _LOCK_SECONDS
    os.makedirs(os.path.dirname(path), exist_ok=True)
    while True:
        # A link, or a pipe, may lie there instead.
        handle = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        with open(handle, "rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise OSError(
                        errno.EBUSY, "another process holds this lock; it may be suspended, then end it", lock
                    ) from None
                time.sleep(0.02)
                continue
            except OSError:
                pass  # a file system without locks
            if _is_at(lock, handle):  # nobody has dropped it meanwhile
                yield
                return


def drop_lock(path: str) -> None:
    """Remove what swaps leave beside a file, unless one is under way."""
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
