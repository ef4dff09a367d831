"""A folder for a worker's temporary files, which the worker removes after training, or else a later worker.

Workers exit by SIGKILL or `os._exit`. Without this folder, the temporary files of TensorFlow's autograph, of callbacks
and of copies for an object store would stay in the system's temporary folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

#: Folder of Ray's session on each node that holds the workers' folders.
FOLDER = "raytf-tmp"

_folder: Path | None = None
#: The earlier value of TMPDIR.
_before: str | None = None
#: Descriptor of the folder, locked until this process exits in any way.
_lock = -1


def begin(base: Path) -> None:
    """Keep temporary files of this process in its own folder below `base`, and remove folders of dead processes."""
    global _folder, _lock, _before
    if _folder is not None:
        return
    try:
        base.mkdir(exist_ok=True)
        _sweep(base)
        folder = Path(tempfile.mkdtemp(prefix="worker-", dir=base))
        _lock = os.open(folder, os.O_RDONLY)
        fcntl.flock(_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return  # keep using the system's temporary folder
    _folder, _before = folder, os.environ.get("TMPDIR")
    os.environ["TMPDIR"] = tempfile.tempdir = str(folder)


def end() -> None:
    """Remove the folder of this process, when nothing needs it any more."""
    global _folder
    if _folder is not None:
        shutil.rmtree(_folder, ignore_errors=True)
        _folder = None
        tempfile.tempdir = None
        if _before is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = _before


def _sweep(base: Path) -> None:
    for folder in base.glob("worker-*"):
        with contextlib.suppress(OSError):
            lock = os.open(folder, os.O_RDONLY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
