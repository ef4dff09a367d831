"""The server of `raytf ui`: who is let in, what it says, and that it changes nothing."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time

import pytest
import requests

from raytf.commands.ui import Ui, is_loopback, listen, main
from raytf.errors import ConfigError
from raytf.runs import ledger, ui_address
from raytf.runs.lease import Lease
from raytf.storage.storage import Storage
from raytf.testing import environment
from raytf.ui.gallery import Gallery
from tests.support.runs import Script, a_run, add_result, add_steps


@pytest.fixture
def storage(tmp_path):
    run = a_run().write(str(tmp_path / "runs" / "first"))
    add_steps(run, lambda step: 1 / step)
    add_result(run)
    Script().at(0, "driver", state="started").write(str(tmp_path / "runs" / "train" / "1"))
    (tmp_path / "runs" / "train" / "1" / "attempts").mkdir()
    (tmp_path / "runs" / "train" / "1" / "attempts" / "a.json").write_text("{}")
    return Storage(str(tmp_path / "runs"))


def contents(folder) -> dict[str, bytes]:
    return {
        os.path.join(base, name): open(os.path.join(base, name), "rb").read()
        for base, _, names in os.walk(folder)
        for name in names
    }


def test_pages_and_json_and_nothing_is_changed(serving, storage):
    before = contents(storage.root)
    url = serving(storage)
    assert [row["name"] for row in requests.get(f"{url}/api/runs", timeout=30).json()] == ["first", "train/1"]
    for path in ("/", "/run/first", "/run/train/1", "/api/page/first", "/api/curves/first"):
        answer = requests.get(url + path, timeout=30)
        assert answer.status_code == 200, (path, answer.text)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    for path in ("/run/none", "/run/../../etc", "/api/page/first/../x", "/events/none", "/api/search/none"):
        answer = requests.get(url + path, timeout=30)
        assert answer.status_code == 404, path
        assert "Traceback" not in answer.text
    for method in ("post", "put", "delete", "patch"):
        assert requests.request(method, f"{url}/run/first", timeout=30).status_code == 405
    assert contents(storage.root) == before


def test_a_sign_of_life_changes_the_head_and_has_nothing_drawn_again(tmp_path):
    storage = Storage(str(tmp_path))
    run = Script().at(0, "driver", state="started").trains(10, 100, True).write(str(tmp_path / "a"))
    gallery = Gallery(storage)
    with Lease(run):
        gallery.refresh()
        drawn, mark = gallery.page("a"), gallery.mark("a")
        ledger.Ledger(run, "a").sign(Script().trains(20, 777).events[0])
        assert gallery.mark("a") != mark
        assert gallery.page("a") is drawn
        assert gallery.first_page("a") is drawn
        assert "777" in gallery.head("a").main
        assert "777" not in drawn.main


def test_only_this_machine_is_let_in_without_a_token(serving, storage):
    url = serving(storage)
    assert requests.get(url, headers={"Host": "runs.example.com"}, timeout=30).status_code == 403
    assert requests.get(url, headers={"Host": "localhost:1"}, timeout=30).status_code == 200


def test_a_token_opens_the_pages_and_stays_in_a_cookie(serving, storage):
    url = serving(storage, token="t" * 20)
    with requests.Session() as session:
        assert session.get(url, timeout=30).status_code == 401
        assert session.get(f"{url}/?token=wrong", timeout=30).status_code == 401
        assert session.get(f"{url}/?token={'t' * 20}", timeout=30).status_code == 200
        assert session.get(f"{url}/run/first", timeout=30).status_code == 200
    bearer = {"Authorization": f"Bearer {'t' * 20}", "Host": "runs.example.com"}
    assert requests.get(url, headers=bearer, timeout=30).status_code == 200


def test_a_change_is_told_within_two_seconds(serving, storage):
    url = serving(storage)
    with requests.get(f"{url}/events/first", stream=True, timeout=60) as stream:
        lines = (line for line in stream.iter_lines() if line.startswith(b"data: "))
        first = next(lines)
        book = ledger.Ledger(storage.child("first"), "b")
        book.add([{"time": time.time(), "kind": "driver", "state": "started"}])
        book.flush()
        changed = time.monotonic()
        assert next(lines) != first
        assert time.monotonic() - changed < 10  # two seconds on a machine that does nothing else


def test_what_is_refused_before_anything_is_served(tmp_path):
    with pytest.raises(ConfigError, match=r"--host 0\.0\.0\.0: anybody who reaches this machine"):
        main(Ui(str(tmp_path), host="0.0.0.0"))
    with pytest.raises(ConfigError, match="--token has 3 characters"):
        main(Ui(str(tmp_path), token="abc"))
    with pytest.raises(ConfigError, match=f"there is no folder {tmp_path}/nowhere"):
        main(Ui(str(tmp_path / "nowhere")))
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"cannot listen at 127.0.0.1:{port}: Address already in use"):
            main(Ui(str(tmp_path), port=port))
    with pytest.raises(ConfigError, match="Choose another --port or --host"):
        listen("127.0.0.1", 70000)


@pytest.mark.parametrize(
    ("host", "is_safe"),
    [
        ("127.0.0.1", True),
        ("127.1.2.3", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("gpu-1", False),
    ],
)
def test_what_is_this_machine_alone(host, is_safe):
    assert is_loopback(host) is is_safe


def test_the_command_says_its_address_and_runs_find_it_until_it_ends(tmp_path):
    env = environment(XDG_CACHE_HOME=str(tmp_path / "cache"))
    command = [sys.executable, "-m", "raytf", "ui", str(tmp_path / "runs"), "--port", "0"]
    (tmp_path / "runs").mkdir()
    look = "import sys; from raytf.runs import ui_address; print(ui_address.page_of(sys.argv[1]))"

    def page_of(uri: str) -> str:
        done = subprocess.run([sys.executable, "-c", look, uri], env=env, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            url = line.rpartition(" ")[2].strip()
            assert url.startswith("http://127.0.0.1:"), line
            deadline = time.monotonic() + 60
            while True:
                with contextlib.suppress(requests.ConnectionError):
                    assert requests.get(f"{url}api/runs", timeout=30).json() == []
                    break
                assert time.monotonic() < deadline
                time.sleep(0.1)
            root = Storage(str(tmp_path / "runs")).uri
            assert page_of(f"{root}/my run") == f"{url}run/my%20run"
            assert page_of("/elsewhere/run") == "None"
            process.send_signal(2)
            rest = process.stdout.read()
            assert process.wait(60) == 130, rest
            assert "Traceback" not in rest
            assert page_of(f"{root}/a") == "None"
        finally:
            process.kill()


def test_notes_of_others_and_of_the_dead_are_passed_over(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "raytf" / "ui"
    folder.mkdir(parents=True)
    note = {"pid": 2**22 + 1, "started": "1", "url": "http://127.0.0.1:1/", "root": "/runs"}
    for name, text in (("a", "{"), ("b", "[]"), ("c", json.dumps(note)), ("d", json.dumps({**note, "pid": "x"}))):
        (folder / f"{name}.json").write_text(text)
    assert ui_address.page_of("/runs/a") is None
    with ui_address.announced("http://127.0.0.1:2/", "/runs"):
        assert ui_address.page_of("/runs/a") == "http://127.0.0.1:2/run/a"
        assert ui_address.page_of("/runs") is None
