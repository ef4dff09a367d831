"""The manifest: what makes a folder a checkpoint, and that damage is noticed."""

from __future__ import annotations

import json
import zlib

import pytest

from raytf.checkpoint import manifest
from raytf.checkpoint.manifest import CheckpointDocument
from raytf.checkpoint.naming import name_of
from raytf.errors import CheckpointError, RunMismatchError, StorageError
from raytf.storage.storage import Storage

NAME = name_of(7, "a")
PATH = f"{manifest.FOLDER}/{NAME}/{manifest.FILE}"
SHARES = [{"file": "share-00000.safetensors", "bytes": 10, "crc32c": 1, "names": ["model/kernel"]}]
DOCUMENT = {"identity": {"--seed": "0"}, "loss": 0.1, "grün": [1, None]}
#: As raytf wrote it into manifests and into memory before there was a class for it.
TOTALS = {"train_seconds": 1.5, "imbalance_seconds": 0.5, "stopped_early": True, "best": ["val_loss", 0.25]}
SLOW = {"identity": {"model": "a"}, "history": [{"epoch": 0, "step": 7, "val_loss": 0.25}]}
MANIFEST = {**TOTALS, **SLOW, "callbacks": {"0": {"wait": 3}}, "world_size": 2}
LIVE = {**TOTALS, "durable_step": 5, "world_size": 2, "weights_hash": 77}


@pytest.fixture
def run(tmp_path):
    return Storage(str(tmp_path / "run"))


def write(run, name=NAME, step=7):
    manifest.write(run, name, step, SHARES, DOCUMENT)


def test_what_is_written_is_read(run):
    write(run)
    assert manifest.read(run, NAME) == {
        "version": manifest.VERSION,
        "step": 7,
        "shares": SHARES,
        "document": DOCUMENT,
    }


def test_a_manifest_names_the_one_before_it(run):
    first = manifest.write(run, NAME, 7, SHARES, DOCUMENT)
    assert manifest.link(run, NAME) == first
    second = manifest.write(run, name_of(9, "a"), 9, SHARES, DOCUMENT, first)
    assert manifest.read(run, second.name)["before"] == {"name": NAME, "sha256": first.sha256}
    assert "before" not in manifest.read(run, NAME)
    manifest.write(run, NAME, 7, SHARES, {**DOCUMENT, "loss": 0.2})
    assert manifest.link(run, NAME).sha256 != first.sha256


def test_keys_that_json_changes_do_not_break_the_checksum(run):
    manifest.write(run, NAME, 7, [], {"by class": {1: (2, 3)}, "nan": float("nan")})
    assert manifest.read(run, NAME)["document"]["by class"] == {"1": [2, 3]}


def test_equal_documents_are_equal_bytes():
    assert manifest.dump({"a": 1, "b": 2}) == manifest.dump({"b": 2, "a": 1})


def test_complete_ones_newest_first(run):
    for step in (9, 10, 2):
        write(run, name_of(step, "a"), step)
    run.put(f"{manifest.FOLDER}/{name_of(11, 'a')}/share-00000.safetensors", b"x")
    run.put(f"{manifest.FOLDER}/notes/{manifest.FILE}", b"x")
    run.put(f"{manifest.FOLDER}/stray-file", b"x")
    assert manifest.list_complete(run) == [name_of(10, "a"), name_of(9, "a"), name_of(2, "a")]


def test_nothing_there(run):
    assert manifest.list_complete(run) == []


def test_on_s3(s3):
    run = Storage(s3("run"))
    write(run)
    assert manifest.list_complete(run) == [NAME]
    assert manifest.read(run, NAME)["step"] == 7


def test_a_missing_manifest(run):
    with pytest.raises(StorageError) as missing:
        manifest.read(run, NAME)
    assert missing.value.kind == "missing"


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b"7", b"{}", b'{"body": {}}', b"\xff\xfe\xff", b'"text"'])
def test_a_damaged_manifest(run, data):
    run.put(PATH, data)
    with pytest.raises(CheckpointError, match=f"checkpoint {NAME}: the manifest cannot be read") as damaged:
        manifest.read(run, NAME)
    assert "\n" not in str(damaged.value)


def test_every_cut_is_noticed(run):
    write(run)
    whole = run.get(PATH)
    for length in range(0, len(whole), 7):
        run.put(PATH, whole[:length])
        with pytest.raises(CheckpointError):
            manifest.read(run, NAME)


@pytest.mark.parametrize(
    ("old", "new"), [(b'"step": 7', b'"step": 8'), (b'"bytes": 10', b'"bytes": 11'), (b"kernel", b"kernal")]
)
def test_a_changed_value_is_noticed(run, old, new):
    write(run)
    assert old in run.get(PATH)
    run.put(PATH, run.get(PATH).replace(old, new))
    with pytest.raises(CheckpointError, match="checksum is wrong"):
        manifest.read(run, NAME)


def test_a_newer_format_asks_for_an_update(run):
    body = {"version": manifest.VERSION + 1, "something": "else"}
    run.put(PATH, json.dumps({"body": body, "crc32": zlib.crc32(manifest.dump(body))}).encode())
    with pytest.raises(RunMismatchError, match=r"newer raytf.*Update raytf"):
        manifest.read(run, NAME)


def test_a_manifest_is_read_and_written_as_before():
    found = CheckpointDocument.parse(MANIFEST)
    assert json.loads(json.dumps(found.of_manifest())) == MANIFEST
    assert (found.best, found.callbacks, found.missing) == (("val_loss", 0.25), {"0": {"wait": 3}}, ())
    assert (found.durable_step, found.weights_hash) == (None, None)


def test_a_copy_in_memory_is_read_and_written_as_before():
    found = CheckpointDocument.parse({"attempt": "x", **SLOW, **LIVE})
    # The order of the keys, too: the bytes in memory are the same.
    assert json.dumps(found.live()) == json.dumps(LIVE)
    assert json.dumps(found.slow()) == json.dumps(SLOW)
    assert found.epochs == 1
    assert "weights_hash" not in CheckpointDocument().live()


def test_a_chain_is_kept_where_there_is_one():
    document = CheckpointDocument(chain="ab")
    for told in (document.of_manifest(), document.live()):
        assert CheckpointDocument.parse({**SLOW, **told}).chain == "ab"
    assert not {"chain"} & {*CheckpointDocument().of_manifest(), *CheckpointDocument().live()}


@pytest.mark.parametrize(
    "name", ["identity", "history", "train_seconds", "imbalance_seconds", "stopped_early", "callbacks"]
)
def test_what_is_needed_to_go_on_and_is_not_there_is_named(name: str):
    found = CheckpointDocument.parse({key: value for key, value in MANIFEST.items() if key != name})
    assert found.missing == (name,)


def test_what_other_versions_add_or_leave_out_does_no_harm():
    assert CheckpointDocument.parse({**MANIFEST, "missing": ["x"], "later": 1}) == CheckpointDocument.parse(MANIFEST)
    old = {key: value for key, value in MANIFEST.items() if key not in ("best", "world_size")}
    assert CheckpointDocument.parse(old).best is None
    assert CheckpointDocument.parse(old).missing == ()
