"""Version folders: what is whole, and that nobody ever sees half of one, on a file system and on an object store."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from raytf.errors import ConfigError, StorageError
from raytf.inference import versions
from raytf.storage.storage import Storage

FILES = {"saved_model.pb": b"graph" * 7, "variables/variables.index": b"i", "variables/variables.data": b"d" * 999}


def saved_model(folder: Path, files: dict[str, bytes] | None = None) -> str:
    """Files as of a SavedModel; nothing here loads them."""
    for name, data in (FILES if files is None else files).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return str(folder)


@pytest.fixture(params=["folder", "s3"])
def models(request, tmp_path: Path) -> Storage:
    """A folder of versions that is not there yet."""
    return Storage(str(tmp_path / "models") if request.param == "folder" else request.getfixturevalue("s3")("models"))


@pytest.mark.parametrize(
    ("name", "number"),
    [("1", 1), ("00000123", 123), ("0", 0), ("9223372036854775807", 2**63 - 1), ("9223372036854775808", None),
     ("1.tmp-ab", None), ("", None), ("-1", None), ("a1", None), ("²", None),
     ("9" * 5000, None), ("0" * 5000 + "7", 7)],
)  # fmt: skip
def test_a_folder_is_a_version_as_tensorflow_serving_takes_it(name, number):
    assert versions.number_of(name) == number


@pytest.mark.parametrize(
    ("sizes", "marked", "problem"),
    [
        ({"saved_model.pb": 1}, None, ""),
        ({"saved_model.pbtxt": 1}, None, ""),
        ({}, None, "saved_model.pb is missing"),
        ({"variables/variables.index": 1}, {"saved_model.pb": 1}, "saved_model.pb is missing"),
        ({"saved_model.pb": 1, "v": 2}, {"saved_model.pb": 1, "v": 2}, ""),
        ({"saved_model.pb": 1}, {"saved_model.pb": 1, "v": 2}, "v is missing"),
        ({"saved_model.pb": 1, "v": 1}, {"saved_model.pb": 1, "v": 2}, "v has 1 of 2 bytes"),
    ],
)
def test_what_is_no_whole_model(sizes, marked, problem):
    assert versions.problem_of(sizes, marked).startswith(problem)
    assert bool(versions.problem_of(sizes, marked)) == bool(problem)


def test_versions_are_numbered_by_themselves_and_keep_what_was_noted(models, tmp_path: Path):
    folder = saved_model(tmp_path / "m")
    numbers = [versions.publish(folder, models, {"step": step}).number for step in (10, 20)]
    assert numbers == [1, 2]
    found = versions.inspect(models)
    assert [(v.number, v.problem, v.notes["step"]) for v in found] == [(2, "", 20), (1, "", 10)]
    target = tmp_path / "copy"
    versions.download(models, found[0], str(target))
    assert {name: (target / name).read_bytes() for name in FILES} == FILES
    assert not [name for name in models.list() if "claim" in name or "tmp" in name]


def test_the_next_number_follows_what_others_left(models, tmp_path: Path):
    models.put("00000007/saved_model.pb", b"of another tool")
    models.put("9/variables/variables.index", b"half of one")
    assert versions.publish(saved_model(tmp_path / "m"), models, {}).number == 10
    assert [v.number for v in versions.whole(versions.inspect(models))] == [10, 7]


def test_versions_are_chosen_by_number(models, tmp_path: Path):
    models.put("9/variables/variables.index", b"half of one")
    with pytest.raises(ConfigError, match=r"has no whole version: saved_model\.pb is missing"):
        versions.choose(models, [])
    for name in ("7", "0008"):
        models.put(f"{name}/saved_model.pb", b"of another tool")
    assert [v.number for v in versions.choose(models, [])] == [8, 7]
    assert [v.number for v in versions.choose(models, [8])] == [8, 7]
    with pytest.raises(ConfigError, match=r"version 9 is not in .*: saved_model\.pb is missing.*Versions there: 7, 8"):
        versions.choose(models, [7, 9])
    with pytest.raises(ConfigError, match=r"version 5 is not in \S+models\S*\. Versions there: 7, 8"):
        versions.choose(models, [5])


class Poller(Storage):
    """A storage that looks, before and after each of its writes, at what a server that polls would see."""

    def __init__(self, uri: str):
        super().__init__(uri)
        self.fails_at: int | None = None
        self.puts: list[str] = []
        self.seen: list[tuple[list[str], list[str]]] = []

    def put(self, name: str, data: bytes | memoryview) -> None:
        self._look()
        if self.fails_at == len(self.puts):
            raise StorageError("the store is away", "unreachable")
        self.puts.append(name)
        super().put(name, data)
        self._look()

    def _look(self) -> None:
        plain = Storage(self.uri)
        whole = [v.name for v in versions.whole(versions.inspect(plain))]
        self.seen.append((whole, [f.name for f in plain.files() if f.name.endswith(versions.GRAPHS)]))


def test_on_a_store_a_version_is_a_model_only_when_it_is_whole(s3, tmp_path: Path):
    models = Poller(s3("models"))
    versions.publish(saved_model(tmp_path / "m"), models, {})
    assert models.puts[-1] == "1/saved_model.pb", "what TensorFlow Serving takes for a model comes last"
    assert all(whole == [] and graphs == [] for whole, graphs in models.seen[:-1])
    assert models.seen[-1] == (["1"], ["1/saved_model.pb"])


@pytest.mark.parametrize("fails_at", range(4))
def test_an_upload_that_fails_leaves_no_version_and_the_next_one_is_whole(s3, tmp_path: Path, fails_at):
    models = Poller(s3("models"))
    models.fails_at = fails_at
    folder = saved_model(tmp_path / "m")
    with pytest.raises(StorageError, match="the store is away"):
        versions.publish(folder, models, {})
    assert all(whole == [] and graphs == [] for whole, graphs in models.seen)
    again = Storage(models.uri)
    assert again.files() == []
    versions.publish(folder, again, {})
    assert [v.problem for v in versions.inspect(again)] == [""]


def test_a_killed_upload_is_passed_over(s3, tmp_path: Path):
    models = Storage(s3("models"))
    models.create(".raytf-claim-1", b"")
    models.put("1/variables/variables.data", b"d")  # and then the process was killed
    assert versions.publish(saved_model(tmp_path / "m"), models, {}).number == 2
    assert [v.number for v in versions.whole(versions.inspect(models))] == [2]


@pytest.mark.parametrize("skew", [-86400, 86400])
def test_what_another_export_writes_stays_whatever_this_machines_clock_says(models, tmp_path: Path, skew, monkeypatch):
    now = time.time() + skew
    others = ["export.tmp-abcdef01/saved_model.pb"] if models.is_local else [".raytf-claim-1", "1/variables/data"]
    for name in others:
        models.put(name, b"d")
    monkeypatch.setattr(versions.time, "time", lambda: now)
    versions.publish(saved_model(tmp_path / "m"), models, {})
    assert all(models.exists(name) for name in others)


def test_what_a_killed_export_left_is_removed_once_its_folder_is_older(tmp_path: Path, monkeypatch):
    models, now = Storage(str(tmp_path / "models")), time.time()
    models.put("export.tmp-abcdef01/saved_model.pb", b"d")
    monkeypatch.setattr(versions.time, "time", lambda: now)
    os.utime(tmp_path / "models" / "export.tmp-abcdef01", (now - 7 * 3600, now - 7 * 3600))
    versions.publish(saved_model(tmp_path / "m"), models, {})
    assert models.list() == ["1/"]


def test_a_claim_that_is_old_by_the_clock_of_the_store_is_removed(s3, tmp_path: Path, monkeypatch):
    models = Storage(s3("models"))
    for name in (".raytf-claim-1", "1/variables/data"):
        models.put(name, b"d")
    real = models.files

    def files(*arguments, **options):
        found = list(real(*arguments, **options))
        return [replace(f, modified=f.modified - (7 * 3600 if f.name == ".raytf-claim-1" else 0)) for f in found]

    monkeypatch.setattr(models, "files", files)
    assert versions.publish(saved_model(tmp_path / "m"), models, {}).number == 2
    assert {name.rstrip("/") for name in models.list()} == {"2"}


def test_exports_at_the_same_time_get_numbers_of_their_own(models, tmp_path: Path):
    folders = [saved_model(tmp_path / f"m{i}", {**FILES, "who": bytes([i]) * 10}) for i in range(4)]
    numbers: list[int] = []
    threads = [
        threading.Thread(target=lambda f=f, i=i: numbers.append(versions.publish(f, models, {"who": i}).number))
        for i, f in enumerate(folders)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = versions.whole(versions.inspect(models))
    assert sorted(numbers) == [1, 2, 3, 4]
    assert sorted(v.notes["who"] for v in found) == [0, 1, 2, 3]
    for version in found:
        assert models.get(f"{version.name}/who") == bytes([version.notes["who"]]) * 10


def test_on_a_file_system_a_version_appears_by_one_rename(tmp_path: Path):
    folder, stop, seen = saved_model(tmp_path / "m", {**FILES, "big": b"b" * 5_000_000}), threading.Event(), set()

    def poll() -> None:
        while not stop.is_set():
            for name in os.listdir(tmp_path / "models") if (tmp_path / "models").exists() else []:
                if versions.number_of(name) is not None:
                    seen.add((name, sum(len(files) for _, _, files in os.walk(tmp_path / "models" / name))))

    poller = threading.Thread(target=poll)
    poller.start()
    for _ in range(5):
        versions.publish(folder, Storage(str(tmp_path / "models")), {})
    stop.set()
    poller.join()
    assert {files for _, files in seen} == {len(FILES) + 2}


def test_a_mark_that_cannot_be_read_is_a_problem(tmp_path: Path):
    models = Storage(str(tmp_path))
    models.put("1/saved_model.pb", b"")
    models.put(f"1/{versions.MARK}", b'{"files": ')
    (version,) = versions.inspect(models)
    assert version.problem.startswith(f"{versions.MARK} cannot be read: it is not JSON, or cut off")


def test_what_was_seen_whole_is_not_read_again(tmp_path: Path):
    models = Storage(str(tmp_path / "models"))
    versions.publish(saved_model(tmp_path / "m"), models, {"step": 1})
    known = versions.inspect(models)
    (tmp_path / "models" / "1" / versions.MARK).write_bytes(
        b"?" * len((tmp_path / "models/1" / versions.MARK).read_bytes())
    )
    assert versions.inspect(models, known) == known
    assert versions.inspect(models)[0].problem


@pytest.mark.parametrize(
    ("uri", "name", "version"),
    [("run", "run", None), ("run/export", "run", None), ("run/export/1", "run", 1), ("models/mnist", "mnist", None)],
)
def test_a_model_is_a_run_a_folder_of_versions_or_a_version(tmp_path: Path, uri, name, version):
    for place in ("run/export/1", "models/mnist/3"):
        saved_model(tmp_path / place)
    models, found, number = versions.models_of(str(tmp_path / uri))
    assert (found, number) == (name, version)
    assert [v.number for v in versions.whole(versions.inspect(models))] == [3 if "mnist" in uri else 1]


@pytest.mark.parametrize(
    ("files", "text"),
    [([], "there is nothing in"), (["checkpoints/x"], "raytf export"), (["saved_model.pb"], "not a version number")],
)
def test_what_is_no_model_says_what_was_expected(tmp_path: Path, files, text):
    for file in files:
        (tmp_path / "m" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "m" / file).write_bytes(b"")
    with pytest.raises(ConfigError, match=text):
        versions.models_of(str(tmp_path / "m"))
