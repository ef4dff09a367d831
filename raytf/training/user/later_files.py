"""Stand-ins for files and summary writers that a program has opened, for the worker that runs its callbacks.

An open file cannot be sent to a worker. The worker gets a stand-in, which opens a file in the run's `files/` when a
callback first uses it. After training, the text is copied into the program's own file, and the event files into the
program's own folder. TensorFlow is imported only when a writer is created.
"""

from __future__ import annotations

import functools
import io
import os
import sys
from collections.abc import Callable
from typing import Any, ClassVar

from raytf import _tensorflow
from raytf.storage import local_files
from raytf.storage.storage import Storage

#: A subfolder of the run's folder.
_FILES = "files"
#: Classes of open files.
_KINDS = (io.TextIOWrapper, io.BufferedWriter, io.BufferedRandom, io.FileIO)


class _Here:
    """The folder in which this process's callbacks write (empty if it runs none), and its summary writers."""

    folder = ""
    writers: ClassVar[list[Any]] = []
    default: ClassVar[tuple[Any, Any]] = (None, None)


def take_default(writer: Any, step: Any) -> None:
    """Store the program's default summary writer (None for none) and its default step, for `write_in`."""
    _Here.default = writer, step


def write_in(folder: str) -> None:
    """Make this process's stand-ins open their files in a folder, and set the program's default summary writer."""
    _Here.folder = folder
    writer, step = _Here.default
    if writer is not None:
        writer.set_as_default(step)


def flush() -> None:
    """Flush the summary writers of this process."""
    for writer in _Here.writers:
        writer.flush()


def place_of(path: str) -> str:
    """Return the name in the run's `files/` for a path of the program, or the path itself if it is a URI."""
    if "://" in path:
        return path
    relative = os.path.relpath(path)
    return os.path.abspath(path).lstrip("/") if relative.startswith("..") else relative


def _opened_at(place: str) -> str:
    if "://" in place:
        return place
    if not _Here.folder:
        raise RuntimeError(f"{place} was opened by the program for its callbacks, but this worker runs no callbacks.")
    return os.path.join(_Here.folder, place)


class LaterFile:
    """Stands for a text or binary file that the program has opened for writing; see `place_of`."""

    def __init__(self, place: str, is_text: bool):
        self._place, self._is_text = place, is_text
        self._file: Any = None

    def _opened(self, mode: str = "w+") -> Any:
        if self._file is None:
            path = _opened_at(self._place)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            text = {"encoding": "utf-8", "errors": "surrogatepass", "newline": ""} if self._is_text else {}
            kind = "" if self._is_text else "b"
            self._file = open(path, mode + kind, **text)  # type: ignore[call-overload]  # noqa: SIM115
        return self._file

    def position(self) -> list[Any]:
        """Return the number of bytes written, and whether the file is closed."""
        if self._file is None:
            return [0, False]
        if self._file.closed:
            return [os.path.getsize(self._file.name), True]
        self._file.flush()
        return [os.fstat(self._file.fileno()).st_size, False]

    def cut(self, position: list[Any]) -> None:
        """Truncate the file to a position and continue there, because later output is written again."""
        size, is_closed = position
        if self._file is None:
            path = _opened_at(self._place)
            self._opened("r+" if os.path.exists(path) else "w+")
        self._file.flush()
        os.truncate(self._file.name, min(size, os.path.getsize(self._file.name)))
        self._file.seek(0, os.SEEK_END)
        if is_closed:
            self._file.close()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._opened(), name)

    def __enter__(self) -> Any:
        return self._opened().__enter__()

    def __exit__(self, *raised: Any) -> Any:
        return self._opened().__exit__(*raised)

    def __iter__(self) -> Any:
        return iter(self._opened())


@functools.cache
def _writer_class() -> Any:
    import tensorflow as tf

    class LaterWriter(tf.summary.SummaryWriter):
        """Stands for a summary writer of the program."""

        def __init__(self, place: str, suffix: str):
            self._place, self._suffix, self._writer = place, suffix, None

        @property
        def _opened(self) -> Any:
            if self._writer is None:
                self._writer = tf.summary.create_file_writer(_opened_at(self._place), filename_suffix=self._suffix)
                _Here.writers.append(self._writer)
            return self._writer

        def set_as_default(self, step: Any = None) -> None:
            self._opened.set_as_default(step)

        def as_default(self, step: Any = None) -> Any:
            return self._opened.as_default(step)

        def init(self) -> Any:
            return self._opened.init()

        def flush(self) -> Any:
            return self._opened.flush()

        def close(self) -> Any:
            return self._opened.close()

    return LaterWriter


def _later_writer(place: str, suffix: str) -> Any:
    return _writer_class()(place, suffix)


def _closed_file() -> Any:
    file = io.StringIO()
    file.close()
    return file


def reducers(sent: list[Any]) -> dict[str, Callable[[Any], Any]]:
    """Return functions that pickle open files and summary writers, and that append what they pickle to `sent`."""

    def file(value: Any) -> Any:
        is_standard = value in (sys.stdin, sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
        if is_standard or type(value) not in _KINDS:  # such as a class of the program or of pytest
            return NotImplemented
        if value.closed:
            return _closed_file, ()
        if not isinstance(getattr(value, "name", None), str) or not value.writable():
            return NotImplemented
        sent.append(value)
        return LaterFile, (place_of(value.name), isinstance(value, io.TextIOBase))

    def writer(value: Any) -> Any:
        folder, suffix = _tensorflow.writer_folder(value)
        if folder is None:
            raise TypeError(
                "cannot pickle this summary writer, because its folder is known only in a program that `raytf run` "
                "runs. Create the writer in the callback's on_train_begin"
            )
        sent.append(value)
        return _later_writer, (place_of(folder), suffix)

    return {
        **dict.fromkeys((f"{kind.__module__}.{kind.__qualname__}" for kind in _KINDS), file),
        "tensorflow.python.ops.summary_ops_v2._ResourceSummaryWriter": writer,
    }


def give_back(run: Storage, sent: list[Any]) -> None:
    """Copy the callbacks' output into the program's files and event folders, after the end of the run."""
    for value in sent:
        if hasattr(value, "as_default"):
            folder = _tensorflow.writer_folder(value)[0] or ""
            name = f"{_FILES}/{place_of(folder)}"
            for file in run.files(name) if "://" not in name else ():
                local_files.check_plain(file.name, run.locate(name))
                local_files.put_inside(folder, file.name, run.get(f"{name}/{file.name}"))
            continue
        data = None if value.closed else run.get_or_none(f"{_FILES}/{place_of(value.name)}")
        if data is not None:
            value.write(data.decode("utf-8", "surrogatepass") if isinstance(value, io.TextIOBase) else data)
            value.flush()
