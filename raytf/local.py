"""Files on a local or network file system: written whole or not at all, created once, swapped one at a time."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import time
import uuid
from collections.abc import Iterator, Sequence

#: How long a swap waits for another one.
_LOCK_SECONDS = 5.0


def put(path: str, data: bytes | memoryview | Sequence[memoryview]) -> None:
    """Write a file, or the pieces of one; it appears, or replaces another one, only when it is complete and on disk."""
    temporary = f"{path}.tmp-{uuid.uuid4().hex[:8]}"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        with open(temporary, "wb") as out:
            for piece in [data] if isinstance(data, (bytes, memoryview)) else data:
                out.write(piece)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


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


def create(path: str, data: bytes) -> bool:
    """Write a file unless there is one; whether it was written."""
    temporary = f"{path}.tmp-{uuid.uuid4().hex[:8]}"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(temporary, "wb") as out:
        out.write(data)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        os.unlink(temporary)
    return True


def version(data: bytes) -> str:
    """What tells a file's bytes from those before and after."""
    return hashlib.sha256(data).hexdigest()


def swap(path: str, data: bytes, expected: str) -> bool:
    """Write a file that is still of a version; whether it was written."""
    with _locked(path):
        try:
            with open(path, "rb") as file:
                found = file.read()
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
    lock = f"{path}.tmp-lock"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(lock, "ab") as file:
        deadline = time.monotonic() + _LOCK_SECONDS
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise OSError(
                        errno.EBUSY, "another process holds this lock; it may be suspended, then end it", lock
                    ) from None
                time.sleep(0.02)
            except OSError:
                break  # a file system without locks
        yield
