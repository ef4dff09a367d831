"""Files of a folder are on disk with their names, and a write that fails leaves nothing."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from raytf.storage import local_files

Write = Callable[..., object]


class Disk:
    """Notes what is written to disk, and which of the files of a folder have their names then.

    Args:
        error: raised where a folder, or a file, is written to disk.
    """

    def __init__(self, error: OSError | None = None, of_folders: bool = False):
        self.written: list[tuple[str, list[str]]] = []
        self._error, self._of_folders = error, of_folders

    def __call__(self, handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        if self._error is not None and os.path.isdir(path) == self._of_folders:
            raise self._error
        os.fsync(handle)
        names = os.listdir(path) if os.path.isdir(path) else []
        self.written.append((os.path.relpath(path).partition(".tmp-")[0], names))


@pytest.mark.parametrize("write", [local_files.put, local_files.create])
def test_a_file_its_name_and_new_folders_are_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Write):
    monkeypatch.chdir(tmp_path)
    disk = Disk()
    write(f"{tmp_path}/a/b/file", b"data", disk)
    folders = [("a", ["b"]), (".", ["a"])]
    assert disk.written == [*folders, ("a/b/file", []), ("a/b", ["file"])]
    assert (tmp_path / "a/b/file").read_bytes() == b"data"
    disk.written.clear()
    local_files.put(f"{tmp_path}/a/b/file", b"other", disk)
    assert disk.written == [("a/b/file", []), ("a/b", ["file"])]


def test_a_deletion_is_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    local_files.put(f"{tmp_path}/a/file", b"data")
    disk = Disk()
    local_files.delete(str(tmp_path), "a/file", disk)
    local_files.delete(str(tmp_path), "a/file", disk)
    assert disk.written == [("a", [])]


@pytest.mark.parametrize("write", [local_files.put, local_files.create])
def test_a_write_that_fails_leaves_nothing(tmp_path: Path, write: Write):
    with pytest.raises(OSError, match="No space left"):
        write(f"{tmp_path}/lease.json", b"data", Disk(OSError(errno.ENOSPC, "No space left on device")))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("write", [local_files.put, local_files.create])
def test_a_file_system_that_cannot_sync_folders_is_no_reason_to_fail(tmp_path: Path, write: Write):
    write(f"{tmp_path}/file", b"data", Disk(OSError(errno.EINVAL, "Invalid argument"), of_folders=True))
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(OSError, match="Input/output error"):
        write(f"{tmp_path}/another", b"data", Disk(OSError(errno.EIO, "Input/output error"), of_folders=True))


def test_one_that_is_there_is_not_created_again(tmp_path: Path):
    assert local_files.create(f"{tmp_path}/file", b"one")
    assert not local_files.create(f"{tmp_path}/file", b"two")
    assert (os.listdir(tmp_path), (tmp_path / "file").read_bytes()) == (["file"], b"one")
