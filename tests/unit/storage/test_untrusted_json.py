"""Documents that others may have written: bounded, and of the shape that was asked for."""

from __future__ import annotations

import json
import os
import threading

import pytest

from raytf.errors import DamagedFileError
from raytf.storage import untrusted_json
from raytf.storage.storage import Storage

SHAPE = untrusted_json.record(
    {"steps": untrusted_json.whole}, {"name": untrusted_json.text, "logs": untrusted_json.each(untrusted_json.number)}
)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "it is empty"),
        (b"{", "not JSON, or cut off"),
        (b'{"steps": 1}\0', "not JSON"),
        (b"\xef\xbb\xbf{}", "not JSON"),
        (b"\xff\xfe", "not text in UTF-8"),
        (b"[" * 200_000, "nested in more than 100 levels"),
        (b"[" * 101 + b"]" * 101, "nested in more than 100 levels"),
        (b'{"steps": ' + b"9" * 5000 + b"}", "a number of 5,000 digits"),
        (b'{"steps": 0.' + b"9" * 5000 + b"}", "a number of 5,002 characters"),
        (b"7", "it is 7, expected an object"),
        (b"{}", "it has no 'steps'"),
        (b'{"steps": "7"}', "'steps' is a text, expected a whole number"),
        (b'{"steps": true}', "'steps' is true"),
        (b'{"steps": -1}', "'steps' is -1"),
        (b'{"steps": 1e999}', "'steps' is Infinity"),
        (b'{"steps": 1, "steps": []}', "'steps' is a list"),
        (b'{"steps": 1, "name": null}', "'name' is null, expected a text"),
        (b'{"steps": 1, "logs": [1, {}]}', "'logs' '[1]' is an object, expected a number"),
    ],
)
def test_what_is_wrong_is_said_with_file_and_reason(tmp_path, data, reason):
    run = Storage(str(tmp_path))
    run.put("a.json", data)
    with pytest.raises(DamagedFileError) as caught:
        untrusted_json.read(run, "a.json", SHAPE)
    assert reason in str(caught.value)
    assert str(tmp_path / "a.json") in str(caught.value)
    assert caught.value.kind == "damaged"


def test_what_is_right_is_read(tmp_path):
    run = Storage(str(tmp_path))
    assert untrusted_json.read(run, "a.json", SHAPE) is None
    document = {"steps": 3, "name": "\U0001f600", "logs": [1, 0.5, float("inf")], "other": {"deep": [[1]]}}
    run.put("a.json", json.dumps(document).encode())
    assert untrusted_json.read(run, "a.json", SHAPE) == document
    assert untrusted_json.decode(b"[" * 100 + b"]" * 100) is not None


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    (tmp_path / "a.json").touch()
    os.truncate(tmp_path / "a.json", 1 << 40)
    with pytest.raises(DamagedFileError, match=r"1,099,511,627,776 bytes or more, but at most 1,048,576 are allowed"):
        untrusted_json.read(Storage(str(tmp_path)), "a.json", SHAPE)


@pytest.mark.parametrize("kind", ["pipe", "folder", "loop", "device"])
def test_what_is_no_file_is_not_waited_for(tmp_path, kind):
    path = tmp_path / "a.json"
    {"pipe": lambda: os.mkfifo(path), "folder": path.mkdir, "loop": lambda: path.symlink_to(path)}.get(
        kind, lambda: path.symlink_to("/dev/zero")
    )()
    found = []

    def read() -> None:
        try:
            untrusted_json.read(Storage(str(tmp_path)), "a.json", SHAPE)
        except DamagedFileError as error:
            found.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    thread.join(30)
    assert len(found) == 1


def test_a_link_is_deleted_and_not_what_it_leads_to(tmp_path):
    (tmp_path / "other" / "inner").mkdir(parents=True)
    (tmp_path / "other" / "inner" / "file").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "link").symlink_to(tmp_path / "other")
    run = Storage(str(tmp_path / "run"))
    run.delete("link/inner/file")
    run.delete("link/inner")
    run.delete("link")
    assert not (tmp_path / "run" / "link").is_symlink()
    assert (tmp_path / "other" / "inner" / "file").read_text() == "mine"


def test_room_is_made_for_what_is_there_alone(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 10)
    assert Storage(str(tmp_path)).get("a", 1 << 50) == b"x" * 10
