"""Temporary files of workers go with them, or with the next one on the node."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

WORKER = """
    import os, pathlib, sys, tempfile
    from raytf.cluster import scratch
    scratch.begin(pathlib.Path(sys.argv[1]))
    tempfile.NamedTemporaryFile(delete=False).write(b"x")
    tempfile.mkdtemp()
    assert os.environ["TMPDIR"] == tempfile.gettempdir()
    print(tempfile.gettempdir(), flush=True)
    if sys.argv[2] == "ends":
        scratch.end()
        tempfile.TemporaryFile()
        os._exit(0)
    sys.stdin.read()
"""


def start(base: Path, how: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(WORKER), str(base), how]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_they_are_removed_by_the_worker_or_by_the_next_one(tmp_path: Path):
    base = tmp_path / "tmp"
    with start(base, "killed") as killed, start(base, "lives") as lives:
        assert killed.stdout is not None
        assert lives.stdout is not None
        first, second = (Path(process.stdout.readline().strip()) for process in (killed, lives))
        assert len(list(first.iterdir())) == 2
        killed.kill()
        killed.wait()
        with start(base, "ends") as ends:
            assert ends.stdout is not None
            third = Path(ends.stdout.readline().strip())
            assert ends.wait(60) == 0
        assert list(base.iterdir()) == [second]
        assert len(list(second.iterdir())) == 2
        assert third.parent == base


def test_a_folder_that_cannot_be_made_is_no_reason_to_stop(tmp_path: Path):
    (tmp_path / "file").touch()
    code = (
        "import pathlib, sys, tempfile; from raytf.cluster import scratch; scratch.begin(pathlib.Path(sys.argv[1])); "
        "scratch.end(); tempfile.TemporaryFile()"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "file" / "tmp")], check=True, timeout=60)
