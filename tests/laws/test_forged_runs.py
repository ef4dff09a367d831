"""A run's folder is data: whatever a stranger puts there, nothing of it is run, and nothing is sent anywhere."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from raytf.testing import environment
from tests.conftest import ROOT
from tests.laws.forged_folders import FORGED, Forger, base

#: How the commands may end: all is well, something differs, refused in one line.
ENDS = {0, 1, 2}


def test_nothing_of_a_forged_folder_is_run_and_nothing_is_sent(tmp_path: Path):
    storage, outside, canary = tmp_path / "storage", tmp_path / "outside", tmp_path / "canary"
    for folder in (outside, canary):
        folder.mkdir()
    (outside / "secret").write_text("a secret of the reader")
    base(storage / "good")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        for number, (what, forge) in enumerate(FORGED.items()):
            run = storage / f"{number:02d} {what}"
            shutil.copytree(storage / "good", run)
            forge(Forger(run, canary, url))
        # Names that a shell would obey.
        shutil.copytree(storage / "good", storage / "$(touch evil)")
        command = [sys.executable, "-m", "tests.laws.forged_commands", str(storage), str(outside)]
        env = environment(HOME=str(outside), XDG_CACHE_HOME=str(outside))
        done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, timeout=600)
        output = (done.stdout + done.stderr).decode(errors="replace")
        listener.setblocking(False)
        assert _none_connected(listener), output[-2000:]
    assert done.returncode == 0, output[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert os.listdir(canary) == []
    assert told["seen"] == []
    assert "Traceback" not in output, output
    codes = told["codes"]
    assert {what: code for what, code in codes.items() if not what.startswith("ui ") and code not in ENDS} == {}
    assert {what: code for what, code in codes.items() if what.startswith("ui ") and code not in (200, 404)} == {}
    assert len(codes) > 40 * 10
    assert codes["$(touch evil): show"] == codes["$(touch evil): bisect"] == 0
    assert (outside / "secret").read_text() == "a secret of the reader"
    assert "a secret of the reader" not in output


def _none_connected(listener: socket.socket) -> bool:
    try:
        listener.accept()
    except BlockingIOError:
        return True
    return False
